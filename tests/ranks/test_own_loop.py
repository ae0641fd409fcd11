"""zero3d.shard in loops of the user's own: the same loop in plain torch gives the same numbers.

Close, 1e-5 in fp32, to the plain loop, which adds all ranks' losses in one process; the levels are bit-equal to each
other in one reduce mode.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero3d
from tests import tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

LEVELS = range(4)
RANKS = 2
Parts = list[Tensor]
"""A batch, rank by rank."""


class Net(nn.Module):
    def __init__(self, wide: int = 6, out: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(wide, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.leave = nn.Linear(8, out)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def net(seed: int = 0, **options: int) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(number: int, wide: int = 6) -> Parts:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(4, wide, generator=generator) for _ in range(RANKS)]


class Plain:
    """One process that stands for all ranks: losses of the ranks' parts are averaged. The other side of `Ranked`."""

    def shard(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> "Plain":
        self.model = model
        return self

    def backward(self, losses: Callable[[Tensor], Tensor], parts: Parts, last: bool = True) -> None:
        (sum(losses(part) for part in parts) / len(parts)).backward()  # type: ignore[union-attr]

    def clip_grad_norm_(self, limit: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))


class Ranked:
    """A rank: the same calls with its own part of each batch."""

    def __init__(self, level: int, reduce: str, marks: bool) -> None:
        self._config = {"zero": {"reduce": reduce}}
        self._level = level
        self._marks = marks

    def shard(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        sharded = zero3d.shard(model, *optimizers, level=self._level, config=self._config)
        return _Calls(sharded, self._marks)


class _Calls:
    def __init__(self, sharded: zero3d.Sharded, marks: bool) -> None:
        self._sharded = sharded
        self._marks = marks
        self.clip_grad_norm_ = sharded.clip_grad_norm_
        self.edit = sharded.edit

    def backward(self, losses: Callable[[Tensor], Tensor], parts: Parts, last: bool = True) -> None:
        with self._sharded.accumulate(not last) if self._marks else nullcontext():
            losses(parts[torch.distributed.get_rank()]).backward()

    def weights(self) -> dict[str, Tensor]:
        with self._sharded.gathered() as model:
            return {name: value.clone() for name, value in model.named_parameters()}


def weights_of(model: nn.Module, sharded: Any) -> dict[str, Tensor]:
    if isinstance(sharded, _Calls):
        return sharded.weights()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


Story = Callable[[Any], tuple[list[float], dict[str, Tensor]]]
"""A loop, told once for both sides -> (numbers along the way, all weights at the end)."""


def usual(side: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Clip, scheduler, groups with rates of their own, two backwards a step, evaluation between steps."""
    model = net()
    groups = [{"params": model.blocks.parameters(), "lr": 3e-2}, {"params": [*model.enter.parameters()]}]
    groups.append({"params": [*model.leave.parameters(), *model.idle.parameters()], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    sharded = side.shard(model, optimizer)
    numbers = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for half in range(2):
            sharded.backward(lambda x: model(x).square().mean(), batch(2 * step + half), last=half == 1)
        numbers.append(sharded.clip_grad_norm_(0.3))
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            model.eval()
            numbers.append(float(model(batch(99)[0]).sum()))
            model.train()
    return numbers, weights_of(model, sharded)


def many_forwards(side: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Two forwards of one backward; a sum that is thrown away; a backward through a part of the model."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sharded = side.shard(model, optimizer)
    for step in range(3):
        sharded.backward(lambda x: model(x).square().mean() + model(x + 1).abs().mean(), batch(step))
        optimizer.step()
        optimizer.zero_grad()
        sharded.backward(lambda x: model(x).sum(), batch(50))
        optimizer.zero_grad()
        sharded.backward(lambda x: model.enter(x).square().mean(), batch(60 + step))
        optimizer.step()
        optimizer.zero_grad()
    return [], weights_of(model, sharded)


def teacher(side: Any) -> tuple[list[float], dict[str, Tensor]]:
    """A frozen model, sharded too, whose inputs' gradients are needed, and a student."""
    student, master = net(), net(7).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    sharded = side.shard(student, optimizer)
    side.__class__ is Ranked and side.shard(master)
    for step in range(3):

        def losses(x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = master(x)
            return F.mse_loss(student(x), wanted) + master(x * student(x)[:, :1]).square().mean()

        sharded.backward(losses, batch(step))
        optimizer.step()
        optimizer.zero_grad()
    return [], weights_of(student, sharded)


def adversaries(side: Any) -> tuple[list[float], dict[str, Tensor]]:
    """A generator and a critic, each with an optimizer, taking turns; the critic's gradients of the generator's turn
    are thrown away."""
    maker, critic = net(1, out=6), net(2, out=1)
    make = torch.optim.Adam(maker.parameters(), lr=1e-2)
    judge = torch.optim.Adam(critic.parameters(), lr=1e-2)
    makes = side.shard(maker, make)
    judges = Plain() if isinstance(side, Plain) else side
    judges = judges.shard(critic, judge)
    for step in range(3):
        judge.zero_grad()
        judges.backward(lambda x: F.softplus(critic(maker(x).detach())).mean() - critic(x).mean(), batch(step))
        judge.step()
        make.zero_grad()
        makes.backward(lambda x: F.softplus(-critic(maker(x))).mean(), batch(30 + step))
        make.step()
    return [], {**weights_of(maker, makes), **{f"critic.{k}": v for k, v in weights_of(critic, judges).items()}}


def two_optimizers(side: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Of one model, one clearing its half alone every second step."""
    model = net()
    first = torch.optim.SGD([*model.enter.parameters(), *model.blocks.parameters()], lr=0.1)
    second = torch.optim.AdamW(model.leave.parameters(), lr=0.01)
    sharded = side.shard(model, first, second)
    for step in range(3):
        sharded.backward(lambda x: model(x).square().mean(), batch(step))
        if step == 1:
            second.zero_grad()
            sharded.backward(lambda x: model(x).abs().mean(), batch(70))
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    return [], weights_of(model, sharded)


class Decayed(torch.optim.AdamW):
    """A subclass whose step calls its class's, so that torch's hooks come twice."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


def subclassed(side: Any) -> tuple[list[float], dict[str, Tensor]]:
    """A subclass of a torch optimizer, and a group that is added later."""
    model = net()
    optimizer = Decayed([*model.enter.parameters(), *model.blocks.parameters()], lr=1e-2)
    sharded = side.shard(model, optimizer)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": model.leave.parameters(), "lr": 0.05})
        sharded.backward(lambda x: model(x).square().mean(), batch(step))
        if step < 2:
            model.leave.zero_grad()  # in plain torch these would go on adding up
        optimizer.step()
        optimizer.zero_grad()
    return [], weights_of(model, sharded)


class Auxiliary(Net):
    """Each block leaves a loss as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            y = block(x)
            block.extra = y.square().mean()  # type: ignore[union-attr]
            x = x + y
        self.extra = x.mean()
        return self.leave(x)


def auxiliary(side: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses that the forward leaves as attributes, and a penalty of the gradient of the input."""
    torch.manual_seed(0)
    model = Auxiliary()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sharded = side.shard(model, optimizer)

    def losses(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x).square().mean()
        extra = model.extra + sum(block.extra for block in model.blocks)  # type: ignore[union-attr,misc,operator]
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + extra + slope.square().sum()

    for step in range(3):
        sharded.backward(losses, batch(step))
        optimizer.step()
        optimizer.zero_grad()
    return [], weights_of(model, sharded)


def thrown_away(side: Any) -> tuple[list[float], dict[str, Tensor]]:
    """A sum that is cleared by zeros before it is whole; a forward and a backward that raise and are caught."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = side.shard(model, optimizer)
    for step in range(3):
        sharded.backward(lambda x: model(x).sum(), batch(40), last=False)
        optimizer.zero_grad(set_to_none=False)
        sharded.backward(lambda x: model(x).square().mean(), batch(step))
        optimizer.step()
        optimizer.zero_grad()

        def fails(gradient: Tensor) -> Tensor:
            raise ArithmeticError

        def spoiled(x: Tensor) -> Tensor:
            out = model(x)
            out.register_hook(fails)
            return out.sum()

        with pytest.raises(ArithmeticError):
            sharded.backward(spoiled, batch(step))
        optimizer.zero_grad()
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 99))
    return [], weights_of(model, sharded)


def unfreezing(side: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Half of the model is frozen at first and trained later; its optimizer had it from the start."""
    model = net()
    model.blocks.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded = side.shard(model, optimizer)
    for step in range(6):
        if step in (2, 4):

            def change(model: nn.Module, train: bool = step == 2) -> None:
                model.blocks.requires_grad_(train)  # type: ignore[union-attr]

            change(model) if isinstance(sharded, Plain) else sharded.edit(change)
        sharded.backward(lambda x: model(x).square().mean(), batch(step))
        optimizer.step()
        optimizer.zero_grad()
    return [], weights_of(model, sharded)


def never_mind(side: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Sums that are thrown away, all or one optimizer's, with a step right after and no backward between."""
    model = net()
    first = torch.optim.SGD([*model.enter.parameters(), *model.blocks.parameters()], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model.leave.parameters(), lr=0.01)
    sharded = side.shard(model, first, second)
    numbers = []
    for step in range(6):
        sharded.backward(lambda x: model(x).square().mean(), batch(step))
        if step % 2:
            numbers.append(sharded.clip_grad_norm_(0.1))
        if step in (2, 3):
            first.zero_grad()
        if step in (1, 2, 3, 4):
            second.zero_grad()
        first.step()
        second.step()
        model.zero_grad() if isinstance(sharded, Plain) else None
    return numbers, weights_of(model, sharded)


STORIES: list[Story] = [
    never_mind,
    unfreezing,
    subclassed,
    auxiliary,
    thrown_away,
    usual,
    many_forwards,
    teacher,
    adversaries,
    two_optimizers,
]


def on_ranks(story: Story) -> dict[str, Any]:
    return {
        f"{reduce}, {'marked' if marks else 'unmarked'}, level {level}": story(Ranked(level, reduce, marks))
        for reduce in ("step", "micro-batch")
        for marks in (True, False)
        for level in LEVELS
    }


@pytest.mark.parametrize("story", STORIES)
def test_a_loop_of_ones_own_gives_the_numbers_of_plain_torch(story: Story) -> None:
    numbers, weights = story(Plain())
    assert any(not torch.equal(value, weights[name]) for name, value in net().named_parameters())
    mine, theirs = run_ranks(RANKS, on_ranks, story, timeout=120)
    for setting, (found, whole) in mine.items():
        assert found == pytest.approx(numbers, rel=1e-5), setting
        for name, value in weights.items():
            torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6, msg=f"{setting}: {name}")
            assert torch.equal(whole[name], theirs[setting][1][name]), setting
        first = mine[setting.replace(setting[-1], "0")]
        assert all(torch.equal(value, first[1][name]) for name, value in whole.items()), setting


def averaged(level: int) -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = zero3d.shard(model, optimizer, level=level)
    rank = torch.distributed.get_rank()
    part = batch(0)[rank][: 1 + 2 * rank]
    model(part).square().sum().backward()
    sharded.average_over(len(part))
    optimizer.step()
    with sharded.gathered():
        return {name: value.clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("level", LEVELS)
def test_averages_over_targets_when_told_their_number(level: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.cat([batch(0)[0][:1], batch(0)[1][:3]])
    (model(samples).square().sum() / 4).backward()
    optimizer.step()
    for name, value in run_ranks(RANKS, averaged, level)[0].items():
        torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-7)


def idle_rank(level: int) -> dict[str, Tensor]:
    """Rank 1 has nothing to do in the second step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = zero3d.shard(model, optimizer, level=level, config={"zero": {"keep_gathered": ["*"]}})
    rank = torch.distributed.get_rank()
    for step in range(2):
        x = batch(step)[rank]
        if step == 0 or rank == 0 or level == 3:  # at level 3 a forward is the gathers of all ranks
            (model(x).square().mean() * (step == 0 or rank == 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with sharded.gathered():
        return {name: value.clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("level", LEVELS)
def test_a_rank_without_a_backward_counts_as_zero(level: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        (sum(model(x).square().mean() for x in batch(step)[: RANKS - step]) / RANKS).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    for name, value in run_ranks(RANKS, idle_rank, level)[0].items():
        torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-7)


def refused() -> list[str]:
    texts = []
    model = net()
    stepped = torch.optim.AdamW(model.parameters())
    model(batch(0)[0]).sum().backward()
    stepped.step()
    twice, trained, closed = net(), net(), net()
    own, left = torch.optim.SGD(trained.parameters()), torch.optim.SGD(closed.parameters())
    sharded, other = zero3d.shard(trained, own), zero3d.shard(closed, left)
    for attempt in (
        lambda: zero3d.shard(net(), stepped),
        lambda: zero3d.shard(net(), torch.optim.AdamW(net().parameters())),
        lambda: zero3d.shard(model := net(), torch.optim.Adafactor(model.parameters())),
        lambda: zero3d.shard(net(), config={"precision": {"compute": "fp16"}}),
        lambda: zero3d.shard(net(), config={"precision": {"gradients": "compute"}}),
        lambda: zero3d.shard(net(), level=7),
        lambda: (zero3d.shard(twice), zero3d.shard(twice)),
        lambda: own.step(lambda: None),
        lambda: sharded.average_over(2.5),  # type: ignore[arg-type]
        lambda: sharded.average_over(torch.tensor(float("nan"))),
        lambda: (other.close(), left.step()),
    ):
        try:
            attempt()
            texts.append("")
        except zero3d.UsageError as error:
            texts.append(str(error))
    return texts


def test_what_cannot_be_honoured_is_refused() -> None:
    told = ["state", "no trainable parameter", "whole matrices", "fp16", "gradients", "level = 7"]
    told += ["sharded already", "closure", "given 2.5 targets", "given nan targets", "closed"]
    for text, word in zip(run_ranks(1, refused)[0], told, strict=True):
        assert word in text


def poisoned(level: int) -> tuple[str, bool, bool]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = zero3d.shard(model, optimizer, level=level)
    rank = torch.distributed.get_rank()
    with sharded.gathered():
        before = copy.deepcopy(dict(model.named_parameters()))
    (model(batch(0)[rank]).sum() * (float("inf") if rank else 1.0)).backward()
    try:
        optimizer.step()
        text = ""
    except zero3d.NonFiniteError as error:
        text = str(error)
    with sharded.gathered():
        same = all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    optimizer.zero_grad()
    model(batch(0)[rank]).sum().backward()
    optimizer.step()
    with sharded.gathered():
        moved = not torch.equal(model.leave.bias, before["leave.bias"])
    return text, same, moved


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_that_is_not_finite_stops_all_ranks_before_the_update(level: int) -> None:
    for text, same, moved in run_ranks(RANKS, poisoned, level):
        assert "not finite" in text and same and moved


def test_tiny_trains_as_with_an_engine() -> None:
    """Sums over targets, averaged over all ranks' targets: bit-equal to Engine at the same level."""
    for engine, own in run_ranks(RANKS, against_engine):
        assert all(torch.equal(value, own[name]) for name, value in engine.items())


def against_engine() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, {"zero": {"level": 2}})
    model = tiny.tiny()
    optimizer = tiny.adamw(model.parameters())
    sharded = zero3d.shard(model, optimizer, level=2)
    for whole in tiny.batches(3, 4):
        part = tiny.part(whole, engine.rank, RANKS)
        engine.step(part)
        total, count = tiny.loss(model(part["tokens"]), part)
        total.backward()
        sharded.average_over(count)
        optimizer.step()
        optimizer.zero_grad()
    with engine.gathered() as one, sharded.gathered() as other:
        return (
            {name: value.clone() for name, value in one.named_parameters()},
            {name: value.clone() for name, value in other.named_parameters()},
        )


def by_name(level: int) -> tuple[str, dict[str, Tensor], Tensor, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = zero3d.shard(model, optimizer, level=level)
    rank = torch.distributed.get_rank()
    model.leave.requires_grad_(False)
    try:
        model(batch(0)[rank])
        text = ""
    except zero3d.UsageError as error:
        text = str(error)
    model.leave.requires_grad_(True)
    model(batch(0)[rank]).square().mean().backward()
    gradients = {name: sharded.grad_of(name) for name in ("enter.weight", "blocks.1.0.bias")}
    optimizer.step()
    sharded.set_weight("leave.bias", torch.arange(3.0))
    return text, gradients, sharded.weight_of("leave.bias"), sharded.full_state_dict()["leave.bias"]


@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_gradients_by_name(level: int) -> None:
    model = net()
    (sum(model(x).square().mean() for x in batch(0)) / RANKS).backward()  # type: ignore[union-attr]
    for text, gradients, bias, saved in run_ranks(RANKS, by_name, level):
        assert "sharded.edit" in text
        for name, value in gradients.items():
            torch.testing.assert_close(value, model.get_parameter(name).grad, rtol=1e-5, atol=1e-7)
        assert bias.tolist() == saved.tolist() == [0.0, 1.0, 2.0]


def copied(level: int) -> bool:
    """A copy right after a step, while weights are still on their way."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = zero3d.shard(model, optimizer, level=level)
    model(batch(0)[torch.distributed.get_rank()]).sum().backward()
    optimizer.step()
    copy_of_it = copy.deepcopy(model)
    with sharded.gathered():
        return all(
            torch.equal(one, other) and type(one) is nn.Parameter
            for one, other in zip(copy_of_it.parameters(), model.parameters())
        )


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_copy_is_plain(level: int) -> None:
    assert run_ranks(RANKS, copied, level) == [True, True]


def asked_too_late(level: int) -> tuple[list[str], float, list[bool], Tensor]:
    """Where gradients are asked for that nobody has; then a step of rank 0's gradients alone."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = zero3d.shard(model, optimizer, level=level)
    rank, told = torch.distributed.get_rank(), []

    def ask() -> None:
        for question in (sharded.grad_norm, lambda: sharded.grad_of("leave.bias")):
            try:
                question()
                told.append("")
            except zero3d.UsageError as error:
                told.append(str(error))

    ask()
    model(batch(0)[rank]).square().mean().backward()
    optimizer.step()
    ask()
    optimizer.zero_grad()
    ask()
    model(batch(0)[rank]).square().mean().backward()
    sharded.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    ask()
    norm = sharded.clip_grad_norm_(1.0)
    before = sharded.full_state_dict()
    optimizer.step()
    same = [torch.equal(value, before[name]) for name, value in sharded.full_state_dict().items()]
    optimizer.zero_grad()
    sharded.average_over(4 if rank == 0 else 0)
    if rank == 0:
        model(batch(1)[0]).sum().backward()
    return told, norm, same, sharded.grad_of("leave.bias")


@pytest.mark.parametrize("level", [0, 2])
def test_gradients_that_no_rank_has_are_told_of_and_those_of_one_rank_are_everyones(level: int) -> None:
    """Clipping and stepping nothing stays what it is in plain torch: nothing."""
    for told, norm, same, bias in run_ranks(RANKS, asked_too_late, level):
        assert len(told) == 8 and all("between loss.backward() and optimizer.step()" in text for text in told), told
        assert norm == 0 and all(same)
        assert bias.tolist() == [1.0, 1.0, 1.0]


def misused() -> tuple[bool, bool, list[str], float]:
    model = net()
    sharded = zero3d.shard(model, level=2)
    stranger = torch.optim.SGD(sharded.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            model(batch(step)[0]).sum().backward()
            sharded.average_over(4)
            sharded.average_over(4)
    seen = all(bool(piece.grad.isnan().all()) for piece in sharded.parameters())  # type: ignore[union-attr]
    bias = float(sharded.grad_of("leave.bias", 0))
    sharded.adopt(stranger)
    stranger.step()
    finite = all(bool(value.isfinite().all()) for value in sharded.full_state_dict().values())
    return seen, finite, [str(one.message) for one in caught], bias


def test_what_is_not_averaged_yet_cannot_be_read_and_a_missing_optimizer_is_told() -> None:
    seen, finite, told, bias = run_ranks(1, misused)[0]
    assert seen and finite
    assert bias == pytest.approx(0.5)  # eight samples over counts of 4, 4, 4 and 4
    assert [text for text in told if "no optimizer is known" in text]
