"""More cases of how users of comparable tools get hurt: branches, windows, norms, rules, losses of one's own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

LEVELS = range(4)


# C24: a parameter that is used on some ranks only.


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.text, self.image = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return (self.image if bool(kind[0]) else self.text)(self.enter(x).tanh())


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches()


def kinds(step: int) -> list[dict[str, Tensor]]:
    """In the first two steps each rank has its own kind, in the third both have the first."""
    generator = torch.Generator().manual_seed(step)
    return [
        {"x": torch.randn(3, 4, generator=generator), "kind": torch.full((3,), rank * (step < 2))} for rank in range(2)
    ]


def squares(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return out.square().sum(), len(out)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def c24(level: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = zero3d.Engine(branches(), squares, sgd, {"zero": {"level": level}})
    for step in range(3):
        engine.step(kinds(step)[engine.rank])
    return {info.name: engine.grad_of(info.name) for info in engine.parameters}, engine.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
def test_c24_parameters_used_on_some_ranks_only(level: int) -> None:
    trace = reference.train(
        branches(), squares, sgd, [kinds(step) for step in range(3)], call=lambda m, b: m(b["x"], b["kind"])
    )
    for gradients, weights in run_ranks(2, c24, level):
        assert not gradients["image.weight"].any()  # nobody used it in the last step
        for name, value in trace.gradients.items():
            expected = torch.zeros_like(gradients[name]) if value is None else value
            torch.testing.assert_close(gradients[name], expected, rtol=1e-5, atol=1e-7)
        for name, value in trace.weights.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-7)


# C43: the last window of micro-batches is not full.


def windows(ranks: int) -> list[list[dict[str, Tensor]]]:
    """Ten micro-batches a rank in windows of 4, 4 and 2; of each window a rank has its own."""
    cuts = ((0, 4), (4, 8), (8, 10))
    every = tiny.batches(10, 2 * ranks)
    return [[tiny.part(batch, rank, ranks) for rank in range(ranks) for batch in every[a:b]] for a, b in cuts]


def c43(level: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    config = {"zero": {"level": level}, "parallel": {"micro_batch": 2}}
    engine = zero3d.Engine(tiny.tiny(layers=2), tiny.loss, tiny.adamw, config)
    losses = []
    for window in windows(2):
        mine = window[: len(window) // 2] if engine.rank == 0 else window[len(window) // 2 :]
        losses.append(engine.step({key: torch.cat([one[key] for one in mine]) for key in mine[0]}).loss)

    model = tiny.tiny(layers=2)
    optimizer = tiny.adamw(model.parameters())
    sharded = zero3d.shard(model, optimizer, level=level)
    for window in windows(2):
        mine = window[: len(window) // 2] if engine.rank == 0 else window[len(window) // 2 :]
        count = torch.tensor(0)
        for number, batch in enumerate(mine):
            total, targets = tiny.loss(model(batch["tokens"]), batch)
            with sharded.accumulate(number + 1 < len(mine)):
                total.backward()
            count += targets
        sharded.average_over(count)
        optimizer.step()
        optimizer.zero_grad()
    own = sharded.full_state_dict()
    assert all(torch.equal(value, own[name]) for name, value in engine.full_state_dict().items())
    return losses, [], own


@pytest.mark.parametrize("level", LEVELS)
def test_c43_the_last_window_is_scaled_by_what_it_holds(level: int) -> None:
    trace = reference.train(tiny.tiny(layers=2), tiny.loss, tiny.adamw, windows(2), call=lambda m, b: m(b["tokens"]))
    for losses, _, weights in run_ranks(2, c43, level):
        assert losses == pytest.approx(trace.losses, rel=1e-5)
        for name, value in trace.weights.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


# C44 (over dp): the norm counts each element once, tied ones too.


def c44(level: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = zero3d.Engine(
        tiny.tiny(layers=2), tiny.loss, sgd, {"zero": {"level": level}, "optimizer": {"clip_norm": 0.1}}
    )
    reports = [engine.step(tiny.part(batch, engine.rank, 4)) for batch in tiny.batches(3, 8)]
    return [one.grad_norm for one in reports], engine.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
def test_c44_norm_and_clipping_on_four_ranks(level: int) -> None:
    steps = [[tiny.part(batch, rank, 4) for rank in range(4)] for batch in tiny.batches(3, 8)]
    trace = reference.train(tiny.tiny(layers=2), tiny.loss, sgd, steps, call=lambda m, b: m(b["tokens"]), clip=0.1)
    for norms, weights in run_ranks(4, c44, level):
        assert norms == pytest.approx(trace.norms, rel=1e-6)
        for name, value in trace.weights.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7)


# C53: the user's optimizer is the rule, for any size, however slices are cut.

SIZES = (1, 7, 8, 1023, 1_000_003)


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.vectors = nn.ParameterList(torch.randn(size, generator=generator) for size in SIZES)

    def forward(self, x: Tensor) -> Tensor:
        return sum((vector * torch.arange(len(vector)).sin()).sum() for vector in self.vectors) * x.mean()  # type: ignore[return-value]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def c53(level: int) -> dict[str, Tensor]:
    engine = zero3d.Engine(Vectors(), lambda out, batch: out, adamw, {"zero": {"level": level}})
    for step in range(4):
        engine.step(torch.full((2,), 1.0 + step))
    return engine.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
def test_c53_the_update_is_torchs_own(level: int) -> None:
    model = Vectors()
    optimizer = adamw(model.parameters())
    for step in range(4):
        model(torch.full((2,), 1.0 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in run_ranks(2, c53, level)[0].items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-7, atol=1e-7)


# C82 (without stages): losses and steps of the user's own, outputs in sample order.


def c82(level: int, ranks: int) -> tuple[dict[str, Tensor], Tensor]:
    model = branches()
    optimizer = sgd(model.parameters())
    rank = 0
    if ranks:
        zero3d.shard(model, optimizer, level=level)
        rank = torch.distributed.get_rank()
    for step in range(3):
        for index in range(2) if not ranks else (rank,):
            batch = kinds(step)[index]
            out = model(batch["x"], torch.zeros(3))
            first, second = out.square().mean(), F.softplus(model(batch["x"] * 2, torch.ones(3))).mean()
            ((first + 0.3 * second) / (1 if ranks else 2)).backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        outputs = model(kinds(9)[0]["x"], torch.zeros(3))
    return {name: value.shape for name, value in model.named_parameters()}, outputs  # type: ignore[misc]


@pytest.mark.parametrize("level", LEVELS)
def test_c82_losses_and_steps_of_ones_own(level: int) -> None:
    shapes, outputs = c82(level, 0)
    for found, out in run_ranks(2, c82, level, 2):
        assert found == shapes
        torch.testing.assert_close(out, outputs, rtol=1e-5, atol=1e-6)


# C83: the logged loss is that of all ranks' targets.


def c83() -> float:
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw)
    batch = tiny.part(tiny.batches(1, 2)[0], engine.rank, 2)
    batch["targets"] = batch["targets"].clamp(min=0)
    batch["targets"].view(-1)[3 if engine.rank == 0 else 13 :] = -100
    return engine.step(batch).loss


def test_c83_ranks_count_by_their_targets() -> None:
    whole = tiny.batches(1, 2)[0]
    targets = whole["targets"].clamp(min=0)
    targets[0, 3:], targets[1, 13:] = -100, -100
    total, count = tiny.loss(tiny.tiny()(whole["tokens"]), {"targets": targets})
    assert int(count) == 16
    assert run_ranks(2, c83) == [pytest.approx(float(total / count), rel=1e-6)] * 2
