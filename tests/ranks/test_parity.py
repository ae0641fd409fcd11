"""Promise 1: the same numbers whatever the level, against a plain loop in one process.

Bit-equal: levels 0 to 3 among each other for the same `zero.reduce`, ranks and precision, with any bucket size, with
overlap and prefetch on or off: the same sums in the same order. Close (1e-5 in fp32): the reference, which adds a
whole batch at once where ranks add parts.
"""

import copy
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import zero3d
from tests import reference, tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

STEPS, SAMPLES = 5, 12
REDUCE = ("step", "micro-batch")


@dataclass
class Trace:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def config(level: int, reduce: str, micro_batch: int, precision: str, **zero: object) -> dict[str, object]:
    return {
        "zero": {"level": level, "reduce": reduce, **zero},
        "parallel": {"micro_batch": micro_batch},
        "precision": {"compute": precision},
        "optimizer": {"clip_norm": 0.5},
    }


def train(options: dict[str, object], ranks: int) -> Trace:
    model = tiny.tiny()
    engine = zero3d.Engine(model, tiny.loss, tiny.adamw, options)
    reports = [engine.step(tiny.part(batch, engine.rank, ranks)) for batch in tiny.batches(STEPS, SAMPLES)]
    return Trace([one.loss for one in reports], [one.grad_norm for one in reports], engine.full_state_dict())


def train_reference(ranks: int, micro_batch: int) -> reference.Trace:
    parts = [
        [
            {key: value.split(micro_batch)[index] for key, value in tiny.part(batch, rank, ranks).items()}
            for rank in range(ranks)
            for index in range(SAMPLES // ranks // micro_batch)
        ]
        for batch in tiny.batches(STEPS, SAMPLES)
    ]
    return reference.train(
        tiny.tiny(),
        tiny.loss,
        tiny.adamw,
        parts,
        call=lambda model, batch: model(batch["tokens"]),
        clip=0.5,
    )


def all_levels(ranks: int, micro_batch: int, precision: str) -> dict[tuple[int, str], Trace]:
    return {
        (level, reduce): train(config(level, reduce, micro_batch, precision), ranks)
        for level, reduce in itertools.product(range(4), REDUCE)
    }


def assert_same_bits(one: Trace, other: Trace, what: object) -> None:
    assert one.losses == other.losses, what
    assert one.norms == other.norms, what
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), (what, name)


def assert_close(one: Trace, other: reference.Trace, tolerance: float, what: object) -> None:
    torch.testing.assert_close(one.losses, other.losses, rtol=tolerance, atol=0)
    torch.testing.assert_close(one.norms, other.norms, rtol=tolerance, atol=0)
    for name, value in one.weights.items():
        scale = float(other.weights[name].abs().max())
        error = float((value - other.weights[name]).abs().max()) / scale
        assert error <= tolerance, (what, name, error)


# fp32 holds the design's bound. In 16 bits a weight's last digit is 2**-8 (bf16) or 2**-11 (fp16) of it: losses, which
# average hundreds of such errors, stay within a few thousandths.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_levels_equal_each_other_and_the_reference(ranks: int, accumulation: int, precision: str) -> None:
    micro_batch = SAMPLES // ranks // accumulation
    results = run_ranks(ranks, all_levels, ranks, micro_batch, precision)
    [plain] = run_ranks(1, train_reference, ranks, micro_batch)
    for found in results:
        for (level, reduce), trace in found.items():
            assert_same_bits(results[0][0, reduce], trace, (level, reduce))
            if precision == "fp32":
                assert_close(trace, plain, TOLERANCE["fp32"], (level, reduce))
            else:
                torch.testing.assert_close(trace.losses, plain.losses, rtol=TOLERANCE[precision], atol=0)


def with_options(level: int, reduce: str, choices: list[dict[str, object]]) -> list[Trace]:
    return [train(config(level, reduce, 2, "fp32", **zero), 2) for zero in choices]


@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_bucket_size_overlap_and_prefetch_change_no_bit(level: int, reduce: str) -> None:
    choices: list[dict[str, object]] = [
        {"bucket_mb": mb, "overlap": overlap, "prefetch": prefetch}
        for mb, overlap, prefetch in [
            (16.0, True, 1),
            (16.0, False, 1),
            (1e-6, True, 2),
            (1e-3, True, 0),
            (1e-3, False, 0),
            (1e3, True, 3),
        ]
    ]
    for traces in run_ranks(2, with_options, level, reduce, choices):
        for choice, trace in zip(choices, traces):
            assert_same_bits(traces[0], trace, choice)


def deep_copy_is_independent() -> bool:
    """The reference must not train the engine's tensors."""
    model = tiny.tiny()
    twin = copy.deepcopy(model)
    return all(a.data_ptr() != b.data_ptr() for a, b in zip(model.parameters(), twin.parameters()))


def test_reference_has_its_own_model() -> None:
    assert run_ranks(1, deep_copy_is_independent) == [True]
