"""Promise 5 where ranks have different numbers of micro-batches in a step, or none.

Bit-equal: levels 0 to 3 among each other, for the same `zero.reduce`. Close (1e-5): the plain loop in one process over
all ranks' micro-batches, which adds them in another order.
"""

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

REDUCE = ("step", "micro-batch")
COUNTS = [(1, 2), (3, 1), (0, 2), (2, 0), (1, 1)]
"""Micro-batches of rank 0 and rank 1, step by step."""
SAMPLES = 2


@dataclass
class Trace:
    losses: list[float]
    norms: list[float]
    tokens: list[int]
    evaluated: list[float]
    weights: dict[str, Tensor]


def micro_batches(step: int, rank: int) -> list[dict[str, Tensor]]:
    return tiny.batches(COUNTS[step][rank], SAMPLES, seed=10 * step + rank)


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor] | None:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else None


def make(level: int, reduce: str, **sections: Any) -> zero3d.Engine:
    options = {
        "zero": {"level": level, "reduce": reduce},
        "parallel": {"micro_batch": SAMPLES},
        "optimizer": {"clip_norm": 0.5},
        **sections,
    }
    return zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, options)


def train(level: int, reduce: str, **sections: Any) -> Trace:
    engine = make(level, reduce, **sections)
    reports, evaluated = [], []
    for step in range(len(COUNTS)):
        batch = joined(micro_batches(step, engine.rank))
        evaluated.append(engine.evaluate(batch).loss if step else 0.0)
        reports.append(engine.step(batch))
    return Trace(
        [one.loss for one in reports],
        [one.grad_norm for one in reports],
        [one.tokens for one in reports],
        evaluated,
        engine.full_state_dict(),
    )


def all_levels() -> dict[tuple[int, str], Trace]:
    return {(level, reduce): train(level, reduce) for level, reduce in itertools.product(range(4), REDUCE)}


def plain() -> reference.Trace:
    steps = [[one for rank in (0, 1) for one in micro_batches(step, rank)] for step in range(len(COUNTS))]
    return reference.train(
        tiny.tiny(), tiny.loss, tiny.adamw, steps, call=lambda m, batch: m(batch["tokens"]), clip=0.5
    )


def assert_like(found: Trace, expected: reference.Trace, what: object) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=0)
    # The batch of a step is evaluated before it: with the weights, so with the loss, that the step begins with.
    torch.testing.assert_close(found.evaluated[1:], found.losses[1:], rtol=1e-6, atol=0)
    for name, value in found.weights.items():
        error = float((value - expected.weights[name]).abs().max() / expected.weights[name].abs().max())
        assert error <= 1e-5, (what, name, error)


def test_uneven_micro_batches_average_over_all_tokens_at_every_level() -> None:
    [expected] = run_ranks(1, plain)
    for found in run_ranks(2, all_levels):
        for (level, reduce), trace in found.items():
            same = found[0, reduce]
            assert trace.losses == same.losses and trace.norms == same.norms, (level, reduce)
            assert all(torch.equal(value, same.weights[name]) for name, value in trace.weights.items())
            assert_like(trace, expected, (level, reduce))


def test_uneven_micro_batches_with_recomputation() -> None:
    [expected] = run_ranks(1, plain)
    for found in run_ranks(2, with_recomputation):
        assert_like(found, expected, "recompute")


def with_recomputation() -> Trace:
    return train(3, "micro-batch", recompute={"mode": "block"})


def fp16(level: int) -> tuple[list[float], list[float]]:
    engine = make(level, "micro-batch", precision={"compute": "fp16"})
    reports = [engine.step(joined(micro_batches(step, engine.rank))) for step in range(len(COUNTS))]
    return [one.loss for one in reports], [one.loss_scale for one in reports]


def test_the_first_loss_scale_is_agreed_on_over_padding() -> None:
    """fp16 sums the first micro-batch's targets over ranks for its first scale: a rank of padding joins in."""
    (losses, scales), (also_losses, also_scales) = run_ranks(2, fp16, 3)
    assert losses == also_losses and scales == also_scales
    assert run_ranks(2, fp16, 0)[0] == (losses, scales)


class Normed(nn.Module):
    """Running statistics, and a count of forwards, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.enter(x))


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def statistics(level: int) -> list[bool]:
    """A learning rate of zero: statistics then follow from this rank's own batches alone."""
    torch.manual_seed(0)
    model = Normed()
    twin = copy.deepcopy(model)
    options = {"zero": {"level": level}, "parallel": {"micro_batch": 3}}
    engine = zero3d.Engine(model, squares, lambda parameters: torch.optim.SGD(parameters, lr=0.0), options)
    generator = torch.Generator().manual_seed(engine.rank)
    for samples in ((6, 3), (0, 3), (3, 9)):
        batch = torch.randn(samples[engine.rank], 4, generator=generator) if samples[engine.rank] else None
        engine.step(batch)
        for part in batch.split(3) if batch is not None else ():
            twin(part)
    mine = dict(engine.model.named_buffers())
    return [torch.allclose(value.float(), mine[name].float()) for name, value in twin.named_buffers()]


@pytest.mark.parametrize("level", range(4))
def test_padding_leaves_running_statistics_alone(level: int) -> None:
    assert run_ranks(2, statistics, level) == [[True] * 3] * 2


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.branches[int(kind[0])](x)


def branch_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def unused(level: int) -> tuple[bool, bool]:
    """Whether each branch moved in a step in which rank 0, which takes branch 0, has nothing."""
    torch.manual_seed(0)
    options = {"zero": {"level": level}, "model": {"blocks": "branches"} if level < 3 else {}}
    model = nn.ModuleDict({"only": Branches()})["only"]
    engine = zero3d.Engine(model, branch_loss, tiny.adamw, options)
    batch = {"x": torch.ones(2, 4), "kind": torch.full((2,), engine.rank)}
    engine.step(batch)
    before = engine.full_state_dict()
    engine.step(batch if engine.rank == 1 else {"x": torch.ones(0, 4), "kind": torch.zeros(0, dtype=torch.int64)})
    after = engine.full_state_dict()
    moved = [not torch.equal(after[f"branches.{n}.weight"], before[f"branches.{n}.weight"]) for n in (0, 1)]
    return moved[0], moved[1]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_padding_uses_no_parameter(level: int) -> None:
    """A parameter that no counted micro-batch reaches has no gradient in plain torch, so its weight does not decay."""
    assert run_ranks(2, unused, level) == [(False, True)] * 2


def nothing(level: int) -> tuple[str, bool, bool, int, float]:
    engine = make(level, "step")
    with pytest.raises(zero3d.DataError) as caught:
        engine.step(tiny.batches(1, 2)[0] if engine.rank == 0 else None)
    engine.step(tiny.batches(1, 2)[0])
    before = engine.full_state_dict()
    report = engine.step(None)
    after = engine.full_state_dict()
    moved = any(not torch.equal(value, before[name]) for name, value in after.items())
    nobody = engine.evaluate(None)
    return str(caught.value), report.skipped, moved, report.tokens + nobody.tokens, nobody.loss


@pytest.mark.parametrize("level", range(4))
def test_nothing_at_all(level: int) -> None:
    """A rank that never saw a batch cannot run along: an error on all, no hang. Nobody has one: a skipped step."""
    for text, skipped, moved, tokens, loss in run_ranks(2, nothing, level):
        assert "rank 1 has no batch" in text and "first step" in text
        assert skipped and not moved and tokens == 0 and loss != loss


def loops(level: int) -> tuple[list[float], int]:
    """Loaders of 3 and 1 batches."""
    engine = make(level, "step")
    parts = tiny.batches(3 if engine.rank == 0 else 1, SAMPLES, seed=engine.rank)
    none = 0
    losses = []
    for batch in engine.batches(parts):
        none += batch is None
        losses.append(engine.step(batch).loss)
    return losses, none


def loops_plain() -> list[float]:
    mine, theirs = (tiny.batches(number, SAMPLES, seed=rank) for rank, number in ((0, 3), (1, 1)))
    steps = [[mine[0], theirs[0]], [mine[1]], [mine[2]]]
    return reference.train(
        tiny.tiny(), tiny.loss, tiny.adamw, steps, call=lambda m, batch: m(batch["tokens"]), clip=0.5
    ).losses


def test_loops_end_together() -> None:
    [expected] = run_ranks(1, loops_plain)
    for level in (0, 3):
        (losses, none), (also, missing) = run_ranks(2, loops, level)
        assert losses == also and (none, missing) == (0, 2)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
