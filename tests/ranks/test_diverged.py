"""Ranks that do different things end soon, all of them, with one text that says who was where."""

import os
import random
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero3d
from tests import reference, tiny
from tests.world import run_ranks
from zero3d.comm import lookout
from zero3d.comm.diverged import diverged
from zero3d.comm.process_axis import ProcessAxis
from zero3d.comm.recorded_axis import Call, RecordedAxis

pytestmark = [pytest.mark.alone, pytest.mark.ranks]


class Dropping(tiny.Tiny):
    """Leaves out the blocks in `left_out`, which its user sets before each step."""

    left_out: frozenset[int] = frozenset()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for number, block in enumerate(self.blocks):
            if number not in self.left_out:
                x = block(x)
        return self.head(self.norm(x))


def dropping() -> Dropping:
    torch.manual_seed(0)
    return Dropping()


def engine_of(model: torch.nn.Module, level: int = 3, **zero: Any) -> zero3d.Engine:
    return zero3d.Engine(model, tiny.loss, tiny.adamw, {"zero": {"level": level, **zero}})


def caught(work: Callable[[], object]) -> tuple[str, str, float]:
    """(class, text, seconds) of the error that `work` raises."""
    began = time.monotonic()
    try:
        work()
    except zero3d.Zero3dError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def skips(ranks: int) -> tuple[str, str, float]:
    """Rank 1 leaves out a block in step 2."""
    model = dropping()
    engine = engine_of(model)
    first, second = (tiny.part(batch, engine.rank, ranks) for batch in tiny.batches(2, 6))
    engine.step(first)
    model.left_out = frozenset([2] if engine.rank == 1 else [])
    return caught(lambda: engine.step(second))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks more often, for the sake of these tests' own time: others keep the intervals that users have."""
    monkeypatch.setattr(lookout, "EVERY", 0.1)
    monkeypatch.setattr(lookout, "PATIENCE", 0.4)


def test_c81_a_skipped_block_is_named_with_collective_step_and_stacks() -> None:
    found = run_ranks(3, skips, 3)
    assert len({text for _, text, _ in found}) == 1, found
    for kind, text, seconds in found:
        assert kind == "DivergedError" and seconds < 15
        assert "in step 2" in text and "the all-gather of weights of blocks.2" in text
        assert "rank 0 was at" in text and "rank 1 was at" in text and "test_diverged.py" in text


def drops(keep: list[str]) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Layer drop with a seed that differs per rank, 20 steps."""
    model = dropping()
    engine = engine_of(model, keep_gathered=keep)
    losses: list[float] = []

    def steps() -> None:
        for batch, left_out in zip(tiny.batches(20, 4), left_outs(engine.rank)):
            model.left_out = left_out
            losses.append(engine.step(tiny.part(batch, engine.rank, 2)).loss)

    _, text, _ = caught(steps)
    return losses, {} if text else engine.full_state_dict(), text


def left_outs(rank: int) -> list[frozenset[int]]:
    draw = random.Random(rank)
    return [frozenset(number for number in range(4) if draw.random() < 0.3) for _ in range(20)]


def test_c25_layer_drop_that_differs_per_rank_equals_one_process() -> None:
    """Close, not equal bits: the reference adds the two ranks' gradients in another order."""
    parts = [[tiny.part(batch, rank, 2) for rank in range(2)] for batch in tiny.batches(20, 4)]
    left_out = {id(parts[step][rank]): left_outs(rank)[step] for step in range(20) for rank in range(2)}

    def call(model: torch.nn.Module, batch: Any) -> Any:
        assert isinstance(model, Dropping)
        model.left_out = left_out[id(batch)]
        return model(batch["tokens"])

    expected = reference.train(dropping(), tiny.loss, tiny.adamw, parts, call=call)
    assert any(zero != one for zero, one in zip(left_outs(0), left_outs(1)))
    for losses, weights, text in run_ranks(2, drops, ["blocks.*"]):
        assert not text
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), rtol=1e-5, atol=0)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)


def test_c25_without_keeping_blocks_gathered_the_error_names_both_modules_and_the_key(hasty: None) -> None:
    texts = [text for _, _, text in run_ranks(2, drops, [])]
    assert texts[0] == texts[1]
    named = set(re.findall(r"weights of (blocks\.\d)", texts[0]))
    assert len(named) == 2
    assert all(f'"{name}.*"' in texts[0] for name in named) and "zero.keep_gathered" in texts[0]


def calls_differ(level: int, first: str, second: str) -> tuple[str, str, float]:
    """After a step, rank 0 makes the call `first` and rank 1 `second`."""
    model = tiny.tiny()
    model.register_buffer("seen", torch.zeros(3))
    engine = engine_of(model, level)
    batch = tiny.part(tiny.batches(1, 4)[0], engine.rank, 2)
    engine.step(batch)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: engine.step(batch),
        "evaluate": lambda: engine.evaluate(batch),
        "full_state_dict": engine.full_state_dict,
        "grad_of": lambda: engine.grad_of("blocks.0.up.weight"),
    }
    return caught(calls[first if engine.rank == 0 else second])


@pytest.mark.parametrize(
    ("level", "first", "second"),
    [
        (2, "grad_of", "step"),  # C23
        (3, "step", "full_state_dict"),
        (0, "full_state_dict", "step"),  # a broadcast, of which rank 0 is the root
        (0, "step", "full_state_dict"),
        (0, "step", "evaluate"),  # torch's own all-reduce
    ],
)
def test_c23_a_collective_call_on_one_rank_ends_all_and_both_calls_are_named(
    level: int, first: str, second: str, hasty: None
) -> None:
    found = run_ranks(2, calls_differ, level, first, second)
    for kind, text, seconds in found:
        assert kind == "DivergedError" and seconds < 10, found
        assert f"(engine.{first})" in text and f"(engine.{second})" in text
        assert "are collective" in text


def two_engines() -> tuple[str, str, float]:
    """Each rank is busy with another of two engines."""
    one = engine_of(tiny.tiny())
    other = zero3d.Engine(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)),
        lambda out, batch: out.square().mean(),
        tiny.adamw,
        {"zero": {"level": 3}},
    )
    if one.rank == 0:
        return caught(one.full_state_dict)
    return caught(lambda: other.step(torch.ones(2, 8)))


def test_ranks_in_two_engines_wait_for_each_other_no_longer_than_in_one(hasty: None) -> None:
    found = run_ranks(2, two_engines)
    assert all(kind == "DivergedError" and seconds < 10 for kind, _, seconds in found), found
    assert found[0][1] == found[1][1] and "(engine.full_state_dict)" in found[0][1]


def computes_long(level: int) -> float:
    """Rank 1 computes for 7 s while rank 0 waits for it."""
    engine = engine_of(tiny.tiny(), level)
    batch = tiny.part(tiny.batches(1, 4)[0], engine.rank, 2)
    engine.step(batch)
    until = time.monotonic() + (7 if engine.rank == 1 else 0)
    while time.monotonic() < until:
        torch.ones(64, 64) @ torch.ones(64, 64)
    return engine.step(batch).loss


def test_a_slow_rank_is_waited_for() -> None:
    losses = run_ranks(2, computes_long, 3)
    assert losses[0] == losses[1]


def cut_off() -> None:
    """What the other ranks see when this process ends."""
    for number in os.listdir("/proc/self/fd"):
        try:
            end = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue
        listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if end.family in (socket.AF_INET, socket.AF_INET6) and not listens:
            end.shutdown(socket.SHUT_RDWR)


def steps_once_less(ends: bool) -> tuple[str, str, float]:
    """Rank 1 takes one step, the others two; then it ends, or goes on without the others."""
    engine = engine_of(tiny.tiny())
    batch = tiny.part(tiny.batches(1, 6)[0], engine.rank, 3)
    engine.step(batch)
    if engine.rank == 1:
        time.sleep(0.5 if ends else 3)
        if ends:
            cut_off()
        return "", "", 0.0
    return caught(lambda: engine.step(batch))


def test_a_rank_that_ended_is_named() -> None:
    for rank, (kind, text, _) in enumerate(run_ranks(3, steps_once_less, True)):
        assert rank == 1 or (kind == "RankFailedError" and "rank 1 is gone" in text), (rank, text)


def test_a_rank_that_computes_beyond_the_time_out_is_named(hasty: None) -> None:
    found = run_ranks(3, steps_once_less, False, group_timeout=2)
    assert any("rank 1 did not join" in text and "it computes" in text for _, text, _ in found), found


def made_other_calls() -> str:
    """All calls ended, and rank 2's were not those of the others."""
    axis = RecordedAxis(ProcessAxis(dist.group.WORLD, torch.device("cpu")))
    left_out = 1 if axis.index == 2 else 2
    axis.calls += [Call("all_gather", f"weights of blocks.{number}", 0) for number in range(4) if number != left_out]
    return str(diverged(axis, torch.device("cpu"), "in step 7"))


def test_c25_ranks_that_come_to_the_end_of_the_step_are_told_which_calls_they_made() -> None:
    texts = run_ranks(3, made_other_calls)
    assert len(set(texts)) == 1
    assert (
        "rank 0 made the all-gather of weights of blocks.1, rank 2 made the all-gather of weights of blocks.2"
        in (texts[0])
    )
    assert 'zero.keep_gathered = ["blocks.1.*", "blocks.2.*"]' in texts[0]
