"""`zero.replicas`: ZeRO shards within groups of dp and reduces across them.

Bit-equal: levels 1 to 3 among each other at the same number of groups, and all ranks. Close (1e-5 in fp32): the
reference. Against one group of all ranks sums are added in another order: groups first, then over them.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from tests.ranks.test_parity import TOLERANCE, Trace, assert_close, assert_same_bits, config, train, train_reference
from tests.world import run_ranks
from zero3d.planner.memory import Widths, states

pytestmark = pytest.mark.ranks

RANKS, GROUPS = 4, 2
SAMPLES = 12
LEVELS = (1, 2, 3)
REDUCE = ("step", "micro-batch")


def all_levels(ranks: int, groups: int, micro_batch: int, precision: str) -> dict[tuple[int, str], Trace]:
    return {
        (level, reduce): train(config(level, reduce, micro_batch, precision, replicas=groups), ranks)
        for level, reduce in itertools.product(LEVELS, REDUCE)
    }


@pytest.mark.parametrize(
    ("ranks", "groups", "accumulation", "precision"),
    [
        (4, 2, 1, "fp32"),
        (4, 2, 3, "fp32"),
        (4, 2, 3, "bf16"),
        # Three groups: parts that do not divide by the number of groups, and sums of more than two terms.
        (6, 3, 1, "fp32"),
    ],
)
def test_levels_equal_each_other_and_the_reference(ranks: int, groups: int, accumulation: int, precision: str) -> None:
    micro_batch = SAMPLES // ranks // accumulation
    results = run_ranks(ranks, all_levels, ranks, groups, micro_batch, precision)
    [plain] = run_ranks(1, train_reference, ranks, micro_batch)
    for found in results:
        for (level, reduce), trace in found.items():
            assert_same_bits(results[0][1, reduce], trace, (level, reduce))
            if precision == "fp32":
                assert_close(trace, plain, TOLERANCE["fp32"], (level, reduce))
            else:
                torch.testing.assert_close(trace.losses, plain.losses, rtol=TOLERANCE[precision], atol=0)


def with_options(level: int, reduce: str) -> list[Trace]:
    choices = [(16.0, True, 1), (5e-3, True, 2), (5e-3, False, 0)]
    return [
        train(
            config(level, reduce, 3, "fp32", replicas=GROUPS, bucket_mb=mb, overlap=overlap, prefetch=prefetch), RANKS
        )
        for mb, overlap, prefetch in choices
    ]


@pytest.mark.parametrize(("level", "reduce"), [(1, "step"), (3, "micro-batch")])
def test_bucket_size_overlap_and_prefetch_change_no_bit(level: int, reduce: str) -> None:
    for traces in run_ranks(RANKS, with_options, level, reduce):
        for choice, trace in enumerate(traces):
            assert_same_bits(traces[0], trace, choice)


@dataclass
class Found:
    losses: list[float]
    norms: list[float]
    tokens: list[int]
    gradients: dict[str, Tensor]
    place: tuple[int, int]


def uneven_batches() -> list[list[dict[str, Tensor]]]:
    """Steps of parts of 1, 2, 1 and 3 samples; of the third no target is counted, of the last one."""
    steps = []
    for batch in tiny.batches(3, 7):
        batch["targets"][3:] = -100
        batch["targets"][5, 0] = 7
        parts = zip(*(value.split([1, 2, 1, 3]) for value in batch.values()), strict=True)
        steps.append([dict(zip(batch, part, strict=True)) for part in parts])
    return steps


def train_unevenly(level: int) -> Found:
    options = {"zero": {"level": level, "replicas": GROUPS}}
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, options)
    reports = [engine.step(parts[engine.dp_index]) for parts in uneven_batches()]
    return Found(
        losses=[one.loss for one in reports],
        norms=[one.grad_norm for one in reports],
        tokens=[one.tokens for one in reports],
        gradients={info.name: engine.grad_of(info.name) for info in engine.parameters},
        place=(engine.dp_index, engine.dp_size),
    )


@pytest.mark.parametrize("level", LEVELS)
def test_uneven_parts_average_over_all_targets_and_gradients_are_whole_on_all_ranks(level: int) -> None:
    steps = uneven_batches()
    plain = reference.train(tiny.tiny(), tiny.loss, tiny.adamw, steps, call=lambda model, batch: model(batch["tokens"]))
    for rank, found in enumerate(run_ranks(RANKS, train_unevenly, level)):
        assert found.place == (rank, RANKS)
        assert found.tokens == [sum(int((part["targets"] != -100).sum()) for part in parts) for parts in steps]
        torch.testing.assert_close(found.losses, plain.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.norms, plain.norms, rtol=1e-5, atol=0)
        assert set(found.gradients) == set(plain.gradients)
        for name, gradient in found.gradients.items():
            expected = plain.gradients[name]
            assert expected is not None
            error = float((gradient - expected).abs().max() / expected.abs().max())
            assert error <= 1e-5, (name, error)


class Buffered(nn.Module):
    """A tiny model with a buffer that each rank fills and writes for itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.tiny = tiny.tiny(seed=number)
        self.register_buffer("mark", torch.full((3,), float(number)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tiny(tokens)


def start(level: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(weights at the start, the buffer at the start, the buffer in the whole state after each rank wrote it)."""
    rank = torch.distributed.get_rank()
    options = {"zero": {"level": level, "replicas": GROUPS}}
    engine = zero3d.Engine(Buffered(rank), tiny.loss, tiny.adamw, options)
    weights, buffer = engine.full_state_dict(), engine.model.get_buffer("mark").clone()
    engine.model.get_buffer("mark").add_(10 * (rank + 1))
    return weights, buffer, engine.full_state_dict()["mark"]


@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_buffers_of_rank_0_are_those_of_all_groups(level: int) -> None:
    expected = Buffered(0).state_dict()
    for weights, buffer, written in run_ranks(RANKS, start, level):
        assert set(weights) == set(expected)
        for name, value in weights.items():
            assert torch.equal(value, expected[name]), name
        assert buffer.tolist() == [0.0] * 3
        assert written.tolist() == [10.0] * 3


@dataclass
class Counted:
    held: dict[str, list[int]]
    sent: list[int]
    padded: int
    reductions: list[str]


def counted(level: int, reduce: str, compute: str) -> Counted:
    options = {
        "zero": {"level": level, "reduce": reduce, "replicas": GROUPS},
        "precision": {"compute": compute, "reduce": "own"},
    }
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, options)
    for batch in tiny.batches(2, RANKS):
        engine.step(tiny.part(batch, engine.rank, RANKS))
    calls = [f"{call.verb} of {call.label}" for call in engine._parts.axis.calls]
    return Counted(
        held=engine.held_bytes(),
        sent=engine.sent_bytes()["dp"],
        padded=sum(shard.bucket.numel for shard in engine._parts.replica.shards),
        reductions=[call for call in calls if "weights" not in call and "tally" not in call],
    )


WIDTHS = {"fp32": Widths(weights=4, gradients=4, optimizer=8), "bf16": Widths(weights=2, gradients=4, optimizer=12)}
CASES = tuple(itertools.product(REDUCE, WIDTHS))


def count_all(level: int) -> list[Counted]:
    return [counted(level, reduce, compute) for reduce, compute in CASES]


@pytest.mark.parametrize("level", LEVELS)
def test_held_bytes_equal_the_formula_to_the_byte_and_sent_bytes_within_3_percent(level: int) -> None:
    group = RANKS // GROUPS
    for found in run_ranks(RANKS, count_all, level):
        for (reduce, compute), one in zip(CASES, found, strict=True):
            widths = WIDTHS[compute]
            expected = states(one.padded, level, dp=RANKS, replicas=GROUPS, widths=widths, reduce=reduce)  # type: ignore[arg-type]
            assert one.held["weights"] == [expected.weights] * RANKS
            assert one.held["gradients"] == [expected.gradients] * RANKS
            assert one.held["optimizer"] == [expected.optimizer] * RANKS
            # Gradients travel as they are held when once a step; a group's sum travels in fp32.
            gathers, travelling = 2 if level == 3 else 1, 4 if reduce == "step" else widths.weights
            within = (gathers * widths.weights + travelling) * one.padded * (group - 1) / group
            across = 2 * 4 * one.padded / group * (GROUPS - 1) / GROUPS
            assert one.sent == pytest.approx([within + across] * RANKS, rel=0.03), (reduce, compute)
            # A bucket's sum over the groups starts with the next bucket's reduction, not at the end.
            first, second, third = one.reductions[:3]
            assert first.startswith("reduce_scatter") and second.startswith("reduce_scatter")
            assert third == f"{first} across groups".replace("reduce_scatter", "all_reduce")
