"""Tensor parallelism: zero3d's own models over dp x tp ranks, beside a plain loop in one process.

Bit-equal: all ranks; levels 0 to 3 among each other at one dp, tp, `sequence_parallel` and `zero.reduce`, as the same
parts are added in the same order. Close (1e-5 in fp32): the reference, whose products add all features at once where
ranks add parts of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from tests.world import run_ranks
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.llama import Llama, LlamaConfig
from zero3d.models.losses import next_token_loss

pytestmark = pytest.mark.ranks

STEPS, SAMPLES, CLIP = 2, 8, 0.5
ODD = 61
"""A vocabulary that neither 2 nor 4 divides."""
LAYOUTS = [(1, 2), (2, 2), (1, 4)]
"""dp, tp"""
SHAPE: dict[str, Any] = {"sequence_length": tiny.LENGTH, "width": 32, "layers": 2, "heads": 4}
KINDS: dict[str, Any] = {
    "gpt, tied": lambda: GPT(GPTConfig(vocabulary=ODD, **SHAPE)),
    "gpt": lambda: GPT(GPTConfig(vocabulary=ODD, tied=False, **SHAPE)),
    "llama, 2 KV heads": lambda: Llama(LlamaConfig(vocabulary=ODD, kv_heads=2, mlp_width=48, **SHAPE)),
    "llama, 1 KV head, tied": lambda: Llama(LlamaConfig(vocabulary=ODD, kv_heads=1, mlp_width=48, tied=True, **SHAPE)),
}


@dataclass
class Trace:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train. What shall give the same bits differs in `level` alone."""

    tp: int
    level: int
    sequence: bool
    reduce: str = "micro-batch"
    micro_batch: int = 4
    precision: str = "fp32"

    def options(self) -> dict[str, Any]:
        return {
            "parallel": {"tp": self.tp, "sequence_parallel": self.sequence, "micro_batch": self.micro_batch},
            "zero": {"level": self.level, "reduce": self.reduce, "bucket_mb": 0.05},
            "precision": {"compute": self.precision},
            "optimizer": {"clip_norm": CLIP},
        }


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = KINDS[kind]()
    return model


def batches(steps: int = STEPS) -> list[dict[str, Tensor]]:
    """tests/tiny.py's, in the odd vocabulary."""
    found = tiny.batches(steps, SAMPLES)
    for batch in found:
        batch["tokens"] %= ODD
        batch["targets"] = torch.where(batch["targets"] < 0, batch["targets"], batch["targets"] % ODD)
    return found


def train(kind: str, run: Run) -> Trace:
    engine = zero3d.Engine(made(kind), next_token_loss_split, tiny.adamw, run.options())
    reports = [engine.step(tiny.part(batch, engine.dp_index, engine.dp_size)) for batch in batches()]
    gradients = {one.name: engine.grad_of(one.name) for one in engine.parameters}
    return Trace([one.loss for one in reports], [one.grad_norm for one in reports], engine.full_state_dict(), gradients)


def next_token_loss_split(logits: Any, batch: dict[str, Tensor]) -> Any:
    return zero3d.cross_entropy(logits, batch["targets"])


def train_all(kind: str, runs: Sequence[Run]) -> list[Trace]:
    return [train(kind, run) for run in runs]


@cache
def plain(kind: str) -> reference.Trace:
    [found] = run_ranks(1, in_one_process, kind)
    trace: reference.Trace = found
    return trace


def in_one_process(kind: str) -> reference.Trace:
    steps = [[batch] for batch in batches()]
    return reference.train(
        made(kind), next_token_loss, tiny.adamw, steps, call=lambda model, batch: model(batch["tokens"]), clip=CLIP
    )


def assert_same_bits(one: Trace, other: Trace, what: object) -> None:
    assert (one.losses, one.norms) == (other.losses, other.norms), what
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), (what, name)
    for name, value in one.gradients.items():
        assert torch.equal(value, other.gradients[name]), (what, name)


def distance(mine: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((mine - other).abs().max() / other.abs().max())


def assert_close(one: Trace, expected: reference.Trace, what: object) -> None:
    assert one.norms[0] > CLIP, "nothing is clipped"
    torch.testing.assert_close(one.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(one.norms, expected.norms, rtol=1e-5, atol=0)
    assert one.weights.keys() == expected.weights.keys()
    assert one.gradients.keys() == expected.gradients.keys()
    for name, value in one.weights.items():
        assert distance(value, expected.weights[name]) <= 1e-5, (what, name)
    for name, value in one.gradients.items():
        gradient = expected.gradients[name]
        assert gradient is not None and distance(value, gradient) <= 1e-5, (what, name)


def check(kind: str, dp: int, runs: Sequence[Run]) -> None:
    """All of `runs`, on ranks that are forked once."""
    ranks = run_ranks(dp * runs[0].tp, train_all, kind, runs, timeout=180)
    firsts: dict[object, Trace] = {}
    for number, run in enumerate(runs):
        trace = ranks[0][number]
        assert_close(trace, plain(kind), run)
        for rank, found in enumerate(ranks):
            assert_same_bits(found[number], trace, (run, rank))
        first = firsts.setdefault((run.tp, run.sequence, run.reduce, run.micro_batch), trace)
        assert_same_bits(trace, first, run)


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
@pytest.mark.parametrize("kind", ["gpt, tied", "llama, 2 KV heads"])
def test_every_level_trains_as_the_plain_loop(kind: str, dp: int, tp: int) -> None:
    """Also with fewer KV heads than ranks, and a vocabulary that does not divide."""
    check(kind, dp, [Run(tp=tp, level=level, sequence=sequence) for sequence in (False, True) for level in range(4)])


@pytest.mark.parametrize(("kind", "dp", "tp"), [("gpt", 2, 2), ("llama, 1 KV head, tied", 1, 4)])
def test_ties_and_heads_of_the_other_kind(kind: str, dp: int, tp: int) -> None:
    check(kind, dp, [Run(tp=tp, level=level, sequence=sequence) for sequence in (False, True) for level in (1, 3)])


@pytest.mark.parametrize("sequence", [False, True])
def test_accumulation_and_when_gradients_are_reduced_change_nothing(sequence: bool) -> None:
    runs = [
        Run(tp=2, level=level, sequence=sequence, reduce=reduce, micro_batch=2)
        for reduce in ("step", "micro-batch")
        for level in (1, 3)
    ]
    check("llama, 2 KV heads", 2, runs)


# As in test_parity.py: the last digit of a weight is 2**-8 (bf16) or 2**-11 (fp16) of it, and losses average many.
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3}


@pytest.mark.parametrize(("dp", "tp"), [(2, 2)])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_16_bits_train_too(precision: str, dp: int, tp: int) -> None:
    kind = "llama, 1 KV head, tied"
    runs = [
        Run(tp=tp, level=level, sequence=sequence, precision=precision)
        for sequence in (False, True)
        for level in (0, 3)
    ]
    ranks = run_ranks(dp * tp, train_all, kind, runs, timeout=180)
    for number, run in enumerate(runs):
        trace = ranks[0][number]
        torch.testing.assert_close(trace.losses, plain(kind).losses, rtol=TOLERANCE[precision], atol=0)
        assert trace.losses != plain(kind).losses
        for rank, found in enumerate(ranks):
            assert_same_bits(found[number], trace, (run, rank))
        if run.level:
            assert_same_bits(trace, ranks[0][number - 1], run)
