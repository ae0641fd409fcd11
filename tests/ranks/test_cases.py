"""How users of comparable tools get hurt, case by case, at every level that a case speaks of."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3d
from tests import reference, tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

LEVELS = range(4)


def make(model: nn.Module, level: int, rule: Any = tiny.adamw, loss: Any = tiny.loss, **sections: Any) -> zero3d.Engine:
    zero = {"level": level, **sections.pop("zero", {})}
    return zero3d.Engine(model, loss, rule, {"zero": zero, **sections})


def in_ranks(ranks: int, work: Any, *args: Any) -> list[Any]:
    return run_ranks(ranks, work, *args)


# C21: user code sees shape [0].


def c21(level: int) -> tuple[Any, ...]:
    plain = {name: (value.shape, value.numel(), value.dtype) for name, value in tiny.tiny().named_parameters()}
    engine = make(tiny.tiny(), level)
    engine.step(tiny.part(tiny.batches(1, 4)[0], engine.rank, 2))
    seen = {name: (value.shape, value.numel(), value.dtype) for name, value in engine.model.named_parameters()}
    count = sum(value.numel() for value in engine.model.parameters())
    texts = []
    for touch in (
        lambda value: value.sum(),
        lambda value: value.data,
        lambda value: value.detach(),
        lambda value: value.tolist(),
        lambda value: value[0, 0],
        lambda value: torch.zeros_like(value) + value,
        lambda value: value.data.copy_(value),
        lambda value: value.data_ptr(),
    ):
        try:
            touch(engine.model.blocks[1].up.weight)  # type: ignore[union-attr,index]
            texts.append("")
        except zero3d.ReleasedParameterError as error:
            texts.append(str(error))
    try:
        engine.model.state_dict()
        texts.append("")
    except zero3d.ReleasedParameterError as error:
        texts.append(str(error))
    whole = engine.full_state_dict()["blocks.1.up.weight"]
    with engine.gathered():
        right = torch.equal(engine.model.blocks[1].up.weight, whole)  # type: ignore[union-attr,index]
    return (
        plain == seen,
        count == sum(one[1] for one in plain.values()),
        texts,
        repr(next(engine.model.parameters())),
        right,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_c21_parameters_keep_shape_dtype_and_name(level: int) -> None:
    for same, counted, texts, shown, right in in_ranks(2, c21, level):
        assert same and counted and right
        assert shown
        for text in texts:
            assert (level == 3) == bool(text)
            assert level < 3 or ("released" in text and "gathered" in text)
        assert level < 3 or "blocks.1.up.weight" in texts[0]


# C28: frozen parameters cost no gradient and no optimizer state.


def c28(level: int) -> dict[str, int]:
    model = tiny.tiny(tied=False)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    engine = make(model, level)
    engine.step(tiny.part(tiny.batches(1, 4)[0], engine.rank, 2))
    held = {kind: values[engine.rank] for kind, values in engine.held_bytes().items()}
    trained = [shard.bucket.numel for shard in engine._parts.replica.shards]
    least = sum(info.numel for info in engine.parameters if info.trainable)
    return {**held, "padded": sum(trained), "least": least}


@pytest.mark.parametrize("level", LEVELS)
def test_c28_frozen_parameters_hold_no_gradient_or_state(level: int) -> None:
    for held in in_ranks(2, c28, level):
        padded = held["padded"]
        assert held["least"] <= padded < 1.25 * held["least"]
        assert held["gradients"] == (4 * padded if level < 2 else 2 * padded)
        assert held["optimizer"] == (8 * padded if level < 1 else 4 * padded)


# C30: several dtypes in one module.


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(16), "linear": nn.Linear(16, 16).bfloat16()}) for _ in range(2)
        )
        self.codes = nn.Parameter(torch.arange(32, dtype=torch.uint8), requires_grad=False)
        self.enter = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.codes[:16].float() / 255
        for block in self.blocks:
            x = x + block["linear"](block["norm"](x).bfloat16()).float()  # type: ignore[index]
        return x


def c30(level: int) -> Any:
    torch.manual_seed(0)
    engine = make(
        Mixed(), level, lambda p: torch.optim.SGD(p, lr=0.01), lambda out, batch: (out.square().sum(), len(out))
    )
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(4, 8, generator=generator)
    losses = [engine.step(batch).loss for _ in range(5)]
    wires = {shard.bucket.dtype for shard in engine._parts.replica.shards}
    state = engine.full_state_dict()
    return losses, wires, {name: value.dtype for name, value in state.items()}, state["codes"].tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_c30_dtypes_stay_and_travel_apart(level: int) -> None:
    expected = {name: value.dtype for name, value in Mixed().state_dict().items()}
    results = in_ranks(2, c30, level)
    for losses, wires, dtypes, codes in results:
        assert wires == {"float32", "bfloat16"}
        assert dtypes == expected
        assert codes == list(range(32))
        assert losses[-1] < losses[0]
        assert losses == results[0][0]


# C33: activation checkpointing, autocast, a frozen base with trained adapters, level 3.


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.a = nn.Linear(16, 2, bias=False)
        self.b = nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


class Adapters(nn.Module):
    def __init__(self, kind: str, autocast: bool) -> None:
        super().__init__()
        self.kind, self.autocast = kind, autocast
        self.enter = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            x = self.enter(x)
            for block in self.blocks:
                if self.kind == "none":
                    x = block(x)
                else:
                    x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            return x


def c33(kind: str, autocast: bool) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    engine = make(Adapters(kind, autocast), 3, loss=lambda out, batch: (out.float().square().sum(), len(out)))
    generator = torch.Generator().manual_seed(1 + engine.rank)
    report = engine.step(torch.randn(4, 16, generator=generator))
    return {info.name: engine.grad_of(info.name) for info in engine.parameters if info.trainable}, report.loss


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["plain", "reentrant"])
def test_c33_checkpointing_changes_no_gradient(kind: str, autocast: bool) -> None:
    kept, _ = in_ranks(2, c33, "none", autocast)[0]
    for gradients, _ in in_ranks(2, c33, kind, autocast):
        assert gradients.keys() == kept.keys() and any(value.any() for value in kept.values())
        for name, value in gradients.items():
            assert torch.equal(value, kept[name]), name


# C38: ranks start from one set of weights whatever their own seeds; dropout differs between them.


class Masks(nn.Module):
    """Keeps what its dropout let through."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Dropout(0.5)]) for _ in range(2))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for linear, drop in self.blocks:  # type: ignore[misc]
            kept = drop(torch.ones(4, 64))
            self.seen.append(kept.detach() > 0)
            x = linear(x) * kept[:, :8]
        return x


def c38(level: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)
    engine = make(Masks(), level, loss=lambda out, batch: (out.sum(), len(out)))
    start = engine.full_state_dict()
    engine.step(torch.ones(4, 8))
    assert isinstance(engine.model, Masks)
    return start, engine.model.seen


@pytest.mark.parametrize("level", LEVELS)
def test_c38_one_start_and_each_ranks_own_dropout(level: int) -> None:
    (first, masks), (second, others) = in_ranks(2, c38, level)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert len(masks) == len(others) == 2
    assert not any(torch.equal(mine, theirs) for mine, theirs in zip(masks, others))
    assert 0.35 < float(torch.stack(masks).float().mean()) < 0.65


def dropout_run(level: int, micro_batch: int, recompute: str) -> tuple[list[float], Tensor]:
    engine = make(
        tiny.tiny(dropout=0.1),
        level,
        zero={"reduce": "step"},
        parallel={"micro_batch": micro_batch},
        recompute={"mode": recompute},
    )
    torch.manual_seed(engine.rank + level)
    losses = [engine.step(tiny.part(batch, engine.rank, 2)).loss for batch in tiny.batches(3, 8)]
    return losses, torch.rand(3)


def test_c38_dropout_is_the_same_at_every_level_and_when_recomputed() -> None:
    plain = in_ranks(2, dropout_run, 0, 2, "none")
    torch.manual_seed(0)
    assert torch.equal(plain[0][1], torch.rand(3)), "the user's own generator is where it was"
    for level in LEVELS:
        for recompute in ("none", "block"):
            assert in_ranks(2, dropout_run, level, 2, recompute)[1][0] == plain[0][0], (level, recompute)


# C39: twenty steps of every level beside the plain loop.


def c39() -> list[list[float]]:
    found = []
    for level in LEVELS:
        engine = make(tiny.tiny(), level)
        found.append([engine.step(tiny.part(batch, engine.rank, 2)).loss for batch in tiny.batches(20, 4)])
    return found


def c39_reference() -> list[float]:
    steps = [[batch] for batch in tiny.batches(20, 4)]
    return reference.train(tiny.tiny(), tiny.loss, tiny.adamw, steps, call=lambda m, b: m(b["tokens"])).losses


def test_c39_losses_of_all_levels_agree() -> None:
    [plain] = in_ranks(1, c39_reference)
    for losses in in_ranks(2, c39)[0]:
        torch.testing.assert_close(losses, plain, rtol=1e-6, atol=0)


# C40: overlapped reductions race.


def c40(level: int) -> list[list[float]]:
    found = []
    for bucket_mb in (1e-6, 1e-3, 1.0, 1e6):
        for overlap in (True, False):
            engine = make(tiny.tiny(layers=2), level, zero={"bucket_mb": bucket_mb, "overlap": overlap})
            found.append([engine.step(tiny.part(batch, engine.rank, 2)).loss for batch in tiny.batches(50, 2)])
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_c40_overlap_and_bucket_size_change_no_bit_in_50_steps(level: int) -> None:
    losses = in_ranks(2, c40, level)[1]
    assert len(losses[0]) == 50
    assert all(one == losses[0] for one in losses)


# C41: gradients of 16-bit weights accumulated in 16 bits.


class Weight(nn.Module):
    """The gradient of `w` is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def c41(level: int, reduce: str) -> Tensor:
    model = Weight().bfloat16()
    engine = make(model, level, loss=lambda out, batch: (out, 1), zero={"reduce": reduce}, parallel={"micro_batch": 1})
    values = torch.full((64, 64), 2.0**-9).bfloat16()
    values[0] = 1.0
    engine.step(values)
    return engine.grad_of("w") * 64 * engine.dp_size


@pytest.mark.parametrize("reduce", ["step", "micro-batch"])
@pytest.mark.parametrize("level", LEVELS)
def test_c41_sums_of_micro_batches_are_fp32(level: int, reduce: str) -> None:
    expected = torch.full((64,), 2 * (1 + 63 * 2.0**-9))
    for gradient in in_ranks(2, c41, level, reduce):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)


# C42, C43, C46, C83: averages are over tokens, however the batch is cut.

COUNTED = (3, 17, 1, 11)


def token_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, tiny.VOCABULARY, (4, tiny.LENGTH), generator=generator)
    targets = torch.randint(0, tiny.VOCABULARY, (4, tiny.LENGTH), generator=generator)
    for row, counted in enumerate(COUNTED):
        targets[row, min(counted, tiny.LENGTH) :] = -100
    return {"tokens": tokens, "targets": targets}


def c42(level: int, micro_batch: int) -> tuple[float, int, float, Tensor, float]:
    engine = make(tiny.tiny(), level, parallel={"micro_batch": micro_batch})
    mine = tiny.part(token_batch(), engine.dp_index, engine.dp_size)
    evaluated = engine.evaluate(mine).loss
    report = engine.step(mine)
    return report.loss, report.tokens, report.grad_norm, engine.grad_of("blocks.0.up.weight"), evaluated


@pytest.mark.parametrize("level", LEVELS)
def test_c42_unequal_token_counts_average_over_tokens(level: int) -> None:
    tokens = sum(min(counted, tiny.LENGTH) for counted in COUNTED)
    [whole] = in_ranks(1, c42, 0, 4)
    assert whole[1] == tokens
    for ranks, micro_batch in ((2, 1), (2, 2), (1, 1), (1, 3), (4, 1)):
        for loss, count, norm, gradient, evaluated in in_ranks(ranks, c42, level, micro_batch):
            assert count == tokens
            assert loss == pytest.approx(whole[0], rel=1e-6) == evaluated
            assert norm == pytest.approx(whole[2], rel=1e-6)
            torch.testing.assert_close(gradient, whole[3], rtol=1e-5, atol=1e-7)


# C45: one place for clipping; the report tells all of it.


def c45(level: int) -> tuple[float, float, float, Tensor, Tensor]:
    engine = make(tiny.tiny(), level, lambda p: torch.optim.SGD(p, lr=1.0), optimizer={"clip_norm": 0.1})
    before = engine.full_state_dict()
    report = engine.step(tiny.part(tiny.batches(1, 4)[0], engine.rank, 2))
    after = engine.full_state_dict()
    name = "blocks.0.up.weight"
    moved = torch.cat([(before[key] - value).flatten() for key, value in after.items() if key != "head.weight"])
    return report.grad_norm, report.clip_coefficient, report.grad_norm_after, moved, engine.grad_of(name)


@pytest.mark.parametrize("level", LEVELS)
def test_c45_clipping_is_what_was_set(level: int) -> None:
    for norm, coefficient, after, moved, gradient in in_ranks(2, c45, level):
        assert norm > 0.2
        assert coefficient == pytest.approx(0.1 / norm, rel=1e-4)
        assert after == pytest.approx(0.1, rel=1e-4)
        assert float(moved.norm()) == pytest.approx(0.1, rel=1e-4)
        assert gradient.abs().max() > 0


# C47, C48: overflow.


class Poison(torch.autograd.Function):
    """Identity whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("inf"))


class Poisoned(nn.Module):
    """Block 1's output gradient is infinite on the ranks and steps that `when` names."""

    def __init__(self, when: Any, in_forward: bool = False) -> None:
        super().__init__()
        self.when, self.in_forward, self.calls = when, in_forward, 0
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if number == 1 and self.when(torch.distributed.get_rank(), self.calls):
                x = Poison.apply(x)
        if self.training:
            self.calls += 1
        return x


def squares(out: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return out.float().square().sum(), len(out)


def c47(level: int, precision: str) -> tuple[int, str, bool]:
    torch.manual_seed(0)
    engine = make(Poisoned(lambda rank, call: rank == 1), level, loss=squares, precision={"compute": precision})
    before = engine.full_state_dict()
    for step in range(20):
        try:
            report = engine.step(torch.ones(2, 8))
            assert report.skipped
        except zero3d.NonFiniteError as error:
            after = engine.full_state_dict()
            return step, str(error), all(torch.equal(value, after[name]) for name, value in before.items())
    return 20, "", False


@pytest.mark.parametrize("level", LEVELS)
def test_c47_endless_overflow_stops_and_says_where_it_began(level: int) -> None:
    for precision, stops_at in (("fp16", 9), ("fp32", 0)):
        for step, text, unchanged in in_ranks(2, c47, level, precision):
            assert step == stops_at
            assert unchanged
            assert "rank 1: the first gradient is that of blocks.1." in text
            assert "began in the backward of blocks.1" in text
            assert "rank 0" not in text


class Overflowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.bad = nn.Linear(4, 4)
        nn.init.constant_(self.bad.weight, 1e30)

    def forward(self, x: Tensor) -> Tensor:
        return self.bad(self.first(x) * 1e30)


def c47_forward(level: int) -> str:
    engine = make(Overflowing(), level, loss=squares)
    try:
        engine.step(torch.ones(2, 4))
    except zero3d.NonFiniteError as error:
        return str(error)
    return ""


def test_c47_names_the_forward_module() -> None:
    for level in LEVELS:
        for text in in_ranks(2, c47_forward, level):
            assert "it began in the forward of bad (Linear)" in text


def c48(level: int) -> tuple[list[bool], list[float], list[float]]:
    torch.manual_seed(0)
    model = Poisoned(lambda rank, call: rank == 3 and call == 2)
    engine = make(model, level, loss=squares, precision={"compute": "fp16"})
    reports = [engine.step(torch.ones(2, 8)) for _ in range(5)]
    return [one.skipped for one in reports], [one.loss_scale for one in reports], [one.lr for one in reports]


@pytest.mark.parametrize("level", LEVELS)
def test_c48_overflow_on_one_rank_skips_on_all(level: int) -> None:
    for skipped, scales, _ in in_ranks(4, c48, level):
        assert skipped == [False, False, True, False, False]
        assert scales[3] == scales[2] == scales[1] / 2


def c76() -> list[float]:
    torch.manual_seed(0)
    model = Poisoned(lambda rank, call: rank == 1 and call == 2)
    engine = make(
        model,
        2,
        loss=squares,
        precision={"compute": "fp16"},
        run={"steps": 6},
        optimizer={"warmup": 2, "schedule": "linear"},
    )
    return [engine.step(torch.ones(2, 8)).lr for _ in range(5)]


def test_c76_a_skipped_step_holds_the_learning_rate() -> None:
    rates = [0.0005, 0.001, 0.001, 0.001, 0.00075]
    # The third step is skipped: its rate was never used, the report shows the last one that was.
    assert in_ranks(2, c76)[0] == pytest.approx(rates)


# C50: the precision that was asked for is the one that runs.


def c50(level: int, precision: str) -> tuple[dict[str, str], dict[str, set[str]]]:
    seen: dict[str, set[str]] = {"activations": set(), "weights in forward": set()}
    engine = make(tiny.tiny(), level, precision={"compute": precision})

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        seen["activations"].add(str(output.dtype))
        seen["weights in forward"].add(str(module.up.weight.dtype))

    engine.model.blocks[0].register_forward_hook(look)  # type: ignore[index,union-attr]
    engine.step(tiny.part(tiny.batches(1, 4)[0], engine.rank, 2))
    shard = engine._parts.replica.shards[0]
    state = engine._parts.optimizer.state_of(shard)
    seen["optimizer state"] = {str(v.dtype) for one in state.values() for v in one.values() if v.dim()}
    seen["master weights"], seen["held gradients"] = {str(shard.master.dtype)}, {str(shard.gradient.dtype)}
    return dict(engine.dtype_plan()), seen


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_c50_the_plan_names_the_dtypes_that_run(precision: str) -> None:
    compute = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    for level in LEVELS:
        for plan, seen in in_ranks(2, c50, level, precision):
            assert seen["activations"] == seen["weights in forward"] == {compute}
            assert plan["weights"] == compute.removeprefix("torch.")
            for what in ("optimizer state", "master weights", "held gradients"):
                assert seen[what] == {"torch.float32"}
                assert plan[what] == "float32"


# C54: gloo sums where a mean is meant.


def c54(level: int) -> Tensor:
    engine = make(Weight(), level, loss=lambda out, batch: (out, 1))
    engine.step(torch.full((1, 64), 1.0 + 2.0 * engine.rank))
    return engine.grad_of("w")


def test_c54_gradients_are_averaged() -> None:
    for level in LEVELS:
        for gradient in in_ranks(2, c54, level):
            assert torch.equal(gradient, torch.full((64,), 2.0))


# C77: one loop for every level, whatever accumulates.


def c77() -> set[tuple[float, ...]]:
    found = set()
    for level in LEVELS:
        engine = make(tiny.tiny(), level, zero={"reduce": "step"}, parallel={"micro_batch": 1})
        found.add(tuple(engine.step(tiny.part(batch, engine.rank, 2)).loss for batch in tiny.batches(3, 8)))
    return found


def test_c77_one_accumulation_interface() -> None:
    [losses] = in_ranks(2, c77)[0]
    assert len(losses) == 3


# C78: an optimizer of the user's own.


class Momentum(torch.optim.Optimizer):
    """SGD with momentum in ten lines."""

    def __init__(self, params: Any, rate: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"rate": rate, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(buffer.mul_(group["beta"]).add_(p.grad), alpha=group["rate"])


def c78(level: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = make(tiny.tiny(), level, Momentum)
    losses = [engine.step(tiny.part(batch, engine.rank, 2)).loss for batch in tiny.batches(5, 4)]
    return losses, engine.full_state_dict()


def c78_reference() -> reference.Trace:
    steps = [[batch] for batch in tiny.batches(5, 4)]

    class Fixed(Momentum):
        """The reference loop sets lr; this optimizer has none."""

    def build(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Fixed(parameters)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return optimizer

    return reference.train(tiny.tiny(), tiny.loss, build, steps, call=lambda m, b: m(b["tokens"]))


@pytest.mark.parametrize("level", LEVELS)
def test_c78_any_elementwise_optimizer(level: int) -> None:
    [plain] = in_ranks(1, c78_reference)
    for losses, weights in in_ranks(2, c78, level):
        torch.testing.assert_close(losses, plain.losses, rtol=1e-5, atol=0)
        for name, value in weights.items():
            torch.testing.assert_close(value, plain.weights[name], rtol=1e-5, atol=1e-6)


# C36: an optimizer that needs the whole matrix is refused by name, before the first step.


class RowNorm(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.grad.norm(dim=-1, keepdim=True) + 1e-6), alpha=group["lr"])


def c36() -> str:
    try:
        make(tiny.tiny(), 1, lambda parameters: RowNorm(parameters, lr=0.1))
    except zero3d.UsageError as error:
        return str(error)
    return ""


def test_c36_a_matrix_optimizer_is_refused() -> None:
    assert "does not treat each element by itself" in in_ranks(1, c36)[0]


def f_loss_from_mean() -> tuple[float, float]:
    """A loss function may return one mean."""
    batch = tiny.batches(1, 4)[0]

    def mean(logits: Tensor, part: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), part["targets"].flatten(), ignore_index=-100)

    engine = make(tiny.tiny(), 2, loss=mean)
    plain = mean(tiny.tiny()(batch["tokens"]), batch)
    return engine.step(batch).loss, float(plain)


def test_a_mean_loss_is_taken() -> None:
    [(loss, plain)] = in_ranks(1, f_loss_from_mean)
    assert loss == pytest.approx(plain, rel=1e-6)
