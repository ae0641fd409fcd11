"""When things start: reductions in one order during backward, gathers ahead of use, weights behind the update."""

from typing import Any

import pytest

import zero3d
from tests import tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks


def watched(level: int, **zero: Any) -> tuple[zero3d.Engine, list[str]]:
    """An engine after two steps, and the log of the third: what the axis was asked, what the model did."""
    options = {"zero": {"level": level, "prefetch": 1, **zero}}
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, options)
    batches = [tiny.part(batch, engine.rank, 2) for batch in tiny.batches(3, 4)]
    for batch in batches[:2]:
        engine.step(batch)
    log: list[str] = []
    axis = engine._parts.axis
    for verb in ("reduce_scatter", "all_reduce", "all_gather"):
        inner = getattr(axis.inner, verb)

        def say(*tensors: Any, verb: str = verb, inner: Any = inner, **rest: Any) -> Any:
            log.append(f"{verb} {tensors[-1]}")
            return inner(*tensors, **rest)

        setattr(axis.inner, verb, say)
    for number, block in enumerate(engine.model.blocks):  # type: ignore[arg-type]
        block.register_forward_hook(lambda *_, n=number: log.append(f"forward of {n} over"))  # type: ignore[union-attr]
        block.register_full_backward_hook(lambda *_, n=number: log.append(f"backward of {n} over"))  # type: ignore[union-attr]
    engine.step(batches[2])
    return engine, log


ORDER = {
    0: ["blocks.3 to norm", "blocks.2", "blocks.1", "blocks.0", "(root) to tokens"],
    1: ["blocks.3 to norm", "blocks.2", "blocks.1", "blocks.0", "(root) to tokens"],
    2: ["norm", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "(root) to tokens"],
    3: ["norm", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "(root) to tokens"],
}
"""Small neighbours share a bucket, of up to a quarter of the model at levels 0 and 1, a sixteenth at 2 and 3."""


def reductions(log: list[str]) -> list[str]:
    calls = [line.partition(" ") for line in log if line.startswith(("reduce_scatter", "all_reduce"))]
    return [label for _, _, label in calls if label != "tally of the step"]


def logs(level: int, overlap: bool) -> list[str]:
    return watched(level, overlap=overlap)[1]


@pytest.mark.parametrize("level", range(4))
def test_reductions_start_in_one_order_while_backward_runs(level: int) -> None:
    mine, theirs = run_ranks(2, logs, level, True)
    order = reductions(mine)
    assert order == ORDER[level]
    assert order == reductions(theirs)
    # C71: the first block is on its way before the first layer's backward ends, at every level.
    kind = "reduce_scatter" if level else "all_reduce"
    assert mine.index(f"{kind} blocks.3{' to norm' * (level < 2)}") < mine.index("backward of 1 over")
    assert mine.index(f"{kind} blocks.2") < mine.index("backward of 0 over")


@pytest.mark.parametrize("level", range(4))
def test_without_overlap_reductions_wait_for_the_end_of_backward(level: int) -> None:
    log = run_ranks(2, logs, level, False)[0]
    first = next(i for i, line in enumerate(log) if line.startswith(("reduce_scatter", "all_reduce")))
    assert first > log.index("backward of 0 over")


def test_level_3_gathers_ahead_of_use() -> None:
    log = run_ranks(2, logs, 3, True)[0]
    for number in range(3):
        gathers = [i for i, line in enumerate(log) if line == f"all_gather weights of blocks.{number + 1}"]
        assert len(gathers) == 2  # once for forward, once for backward
        assert gathers[0] < log.index(f"forward of {number} over")
    for number in range(1, 4):
        gathers = [i for i, line in enumerate(log) if line == f"all_gather weights of blocks.{number - 1}"]
        assert gathers[1] < log.index(f"backward of {number} over")


def published(level: int) -> tuple[bool, bool, bool]:
    """(weights were still under way when the step was over, reading one gave the new value, it was new)."""
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, {"zero": {"level": level}})
    before = engine.full_state_dict()["blocks.2.up.weight"]
    engine.step(tiny.part(tiny.batches(1, 4)[0], engine.rank, 2))
    parameter = engine.model.blocks[2].up.weight  # type: ignore[union-attr,index]
    coming = type(parameter).__torch_function__ is not type(engine.model.norm.bias.data).__torch_function__
    read = parameter.detach().clone()
    after = engine.full_state_dict()["blocks.2.up.weight"]
    return coming, bool((read == after).all()), not bool((before == after).all())


@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_published_behind_the_update(level: int) -> None:
    assert run_ranks(2, published, level) == [(True, True, True)] * 2
