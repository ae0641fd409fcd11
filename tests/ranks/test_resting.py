"""Sums of gradients have no memory while a schedule's forwards pile up, and are what they are without that."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests.world import run_ranks
from zero3d import census
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.tensor.loss import next_token_loss

pytestmark = pytest.mark.ranks

SIZES = {"vocabulary": 32, "sequence_length": 8, "width": 16, "layers": 4, "heads": 2}
WEIGHT = "blocks.0.attention.out.weight"


def batch(micro_batches: int, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 32, (micro_batches, 9), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def engine_of(schedule: str, level: int) -> zero3d.Engine:
    torch.manual_seed(0)
    config = {"parallel": {"pp": 2, "schedule": schedule, "micro_batch": 1}, "zero": {"level": level}}
    return zero3d.Engine(GPT(GPTConfig(**SIZES)), next_token_loss, "adamw", config)


def bytes_of_sums(engine: zero3d.Engine) -> int:
    return census.held(engine._parts)["gradients"]


@contextmanager
def in_forwards(engine: zero3d.Engine, found: list[int]) -> Iterator[None]:
    def seen(module: nn.Module, *_: Any) -> None:
        found.append(bytes_of_sums(engine))

    hooks = [
        block.register_forward_hook(seen) for block in engine.model.blocks if next(block.parameters(), None) is not None
    ]  # type: ignore[union-attr]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def weighed(schedule: str, level: int, micro_batches: int) -> tuple[list[int], int, int]:
    """(bytes of sums in each forward of a block in the second step, after the first, and after the second)."""
    engine = engine_of(schedule, level)
    engine.step(batch(micro_batches, 0))
    before, found = bytes_of_sums(engine), []
    with in_forwards(engine, found):
        engine.step(batch(micro_batches, 1))
    return found, before, bytes_of_sums(engine)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize(("schedule", "micro_batches"), [("gpipe", 4), ("gpipe", 1), ("1f1b", 4)])
def test_sums_have_no_memory_while_forwards_pile_up(schedule: str, micro_batches: int, level: int) -> None:
    for found, before, after in run_ranks(2, weighed, schedule, level, micro_batches):
        assert before == after > 0 and len(found) == 2 * micro_batches
        assert set(found) == ({0} if (schedule, micro_batches) == ("gpipe", 4) else {before})


def disturbed(level: int, rests: bool) -> tuple[Tensor, Tensor, list[float]]:
    """(gradients of a weight after two steps, the same once they rest, losses)."""
    engine = engine_of("gpipe", level)
    losses = [engine.step(batch(4, number)).loss for number in range(2)]
    gradient = engine.grad_of(WEIGHT)
    if rests:
        engine._parts.replica.rest()
    again = engine.grad_of(WEIGHT)
    losses += [engine.step(batch(4, number)).loss for number in range(2, 4)]
    return gradient, again, losses


@pytest.mark.parametrize("level", [0, 2, 3])
def test_who_asks_for_sums_that_rest_is_told_that_there_are_none(level: int) -> None:
    """As after a step that has ended before its first gradient. The steps after it are as they would be."""
    for (gradient, again, losses), (other, same, expected) in zip(
        run_ranks(2, disturbed, level, True), run_ranks(2, disturbed, level, False), strict=True
    ):
        assert torch.equal(gradient, other) and torch.equal(gradient, same) and gradient.any()
        assert not again.any() and again.shape == gradient.shape
        assert losses == expected
