"""The bundled Llama at levels 0 and 3 on two ranks, beside a plain loop in one process.

Bit-equal: both levels, for the same `zero.reduce`. Close (1e-5 in fp32): the reference, which adds a whole batch at
once where ranks add parts.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import zero3d
from tests import reference, tiny
from tests.world import run_ranks
from zero3d.models.gpt import generate
from zero3d.models.llama import Llama, LlamaConfig
from zero3d.models.losses import next_token_loss

pytestmark = pytest.mark.ranks

STEPS, SAMPLES, RANKS, MICRO_BATCH = 4, 8, 2, 2


@dataclass
class Trace:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def llama(kv_heads: int | None, tied: bool) -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocabulary=tiny.VOCABULARY,
        sequence_length=tiny.LENGTH,
        width=32,
        layers=3,
        heads=4,
        kv_heads=kv_heads,
        tied=tied,
    )
    return Llama(config)


def train(level: int, reduce: str, kv_heads: int | None, tied: bool) -> Trace:
    options = {
        "zero": {"level": level, "reduce": reduce, "bucket_mb": 0.01},
        "parallel": {"micro_batch": MICRO_BATCH},
        "optimizer": {"clip_norm": 0.5},
    }
    engine = zero3d.Engine(llama(kv_heads, tied), next_token_loss, tiny.adamw, options)
    reports = [engine.step(tiny.part(batch, engine.rank, RANKS)) for batch in tiny.batches(STEPS, SAMPLES)]
    gradients = {one.name: engine.grad_of(one.name) for one in engine.parameters}
    return Trace([one.loss for one in reports], [one.grad_norm for one in reports], engine.full_state_dict(), gradients)


def at_both_levels(kv_heads: int | None, tied: bool) -> dict[tuple[int, str], Trace]:
    return {
        (level, reduce): train(level, reduce, kv_heads, tied)
        for level, reduce in itertools.product((0, 3), ("step", "micro-batch"))
    }


def in_one_process(kv_heads: int | None, tied: bool) -> reference.Trace:
    steps = [[batch] for batch in tiny.batches(STEPS, SAMPLES)]
    model = llama(kv_heads, tied)
    return reference.train(
        model, next_token_loss, tiny.adamw, steps, call=lambda model, batch: model(batch["tokens"]), clip=0.5
    )


def distance(mine: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((mine - other).abs().max() / other.abs().max())


@pytest.mark.parametrize(("kv_heads", "tied"), [(None, False), (2, False), (1, True)])
def test_levels_equal_each_other_and_the_reference(kv_heads: int | None, tied: bool) -> None:
    results = run_ranks(RANKS, at_both_levels, kv_heads, tied)
    [plain] = run_ranks(1, in_one_process, kv_heads, tied)
    for found in results:
        for (level, reduce), trace in found.items():
            first, what = results[0][0, reduce], (level, reduce)
            assert (trace.losses, trace.norms) == (first.losses, first.norms), what
            torch.testing.assert_close(trace.losses, plain.losses, rtol=1e-5, atol=0)
            torch.testing.assert_close(trace.norms, plain.norms, rtol=1e-5, atol=0)
            assert trace.weights.keys() == plain.weights.keys()
            for name, value in trace.weights.items():
                assert torch.equal(value, first.weights[name]), (what, name)
                assert distance(value, plain.weights[name]) <= 1e-5, (what, name)
            for name, gradient in trace.gradients.items():
                assert torch.equal(gradient, first.gradients[name]), (what, name)
                assert distance(gradient, plain.gradients[name]) <= 1e-5, (what, name)


def test_generating_needs_no_more_than_gathered_weights() -> None:
    assert run_ranks(RANKS, generated_alike) == [True] * RANKS


def generated_alike() -> bool:
    engine = zero3d.Engine(llama(2, False), next_token_loss, tiny.adamw, {"zero": {"level": 3}})
    engine.step(tiny.part(tiny.batches(1, SAMPLES)[0], engine.rank, RANKS))
    plain = llama(2, False)
    plain.load_state_dict(engine.full_state_dict())
    prompt = torch.arange(6).view(2, 3)
    with engine.gathered() as model:
        drawn = generate(model, prompt, 20, sequence_length=tiny.LENGTH, temperature=0)
    return torch.equal(drawn, generate(plain, prompt, 20, sequence_length=tiny.LENGTH, temperature=0))
