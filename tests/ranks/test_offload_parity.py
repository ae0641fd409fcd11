"""Promise 1 with offload: where master weights, gradients and optimizer state live changes no number.

Bit-equal, on every rank: losses, norms, clipping, loss scales and weights of a run with offload and of the same run
without, whatever is done between its steps. Close: gradients that are read (1e-6, as the device's update scales them
where they are), and in fp32 the weights of the plain loop (1e-5). `tests/offload_matrix.py` has all of the runs.
"""

from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import zero3d
from tests import tiny
from tests.offload_cases import (
    CASES,
    Run,
    Trace,
    assert_close,
    assert_same_bits,
    batches,
    every_run,
    plain,
    small,
    train_all,
    trains,
)
from tests.world import run_ranks

pytestmark = pytest.mark.ranks


def sample() -> list[Run]:
    """Of each case a run, and of the first one a run for each home and precision; which ones takes turns, so that
    ranks, levels, homes, precisions and `zero.reduce` all come."""
    found: dict[Any, list[Run]] = defaultdict(list)
    for run in every_run():
        found[run.case, *((run.home, run.precision) if run.case == "all" else ())].append(run)
    number = count()
    return [runs[5 * next(number) % len(runs)] for runs in found.values()]


SAMPLE = sample()


def test_the_sample_has_every_value_of_every_factor() -> None:
    for factor in ("case", "world", "level", "home", "precision", "reduce"):
        assert {getattr(run, factor) for run in SAMPLE} == {getattr(run, factor) for run in every_run()}, factor


@pytest.mark.parametrize(("world", "half"), [(1, 0), (1, 1), (2, 0), (2, 1), (4, 0), (4, 1)])
def test_offload_changes_no_bit(world: int, half: int, tmp_path: Path) -> None:
    runs = [run for run in SAMPLE if run.world == world][half::2]
    ranks = run_ranks(world, train_all, [*(run.beside for run in runs), *runs], str(tmp_path), timeout=300)
    close = {run.case for run in runs if run.precision == "fp32" and CASES[run.case].close}
    expected = {name: run_ranks(1, plain, name)[0] for name in sorted(close)}
    for number, run in enumerate(runs):
        for rank, traces in enumerate(ranks):
            assert_same_bits(traces[len(runs) + number], traces[number], f"{run}, rank {rank}")
        if run.case in expected and run.precision == "fp32":
            assert_close(ranks[0][len(runs) + number], expected[run.case], run)
    assert not any(tmp_path.iterdir())  # files are gone with the engines that made them


def two(folder: str, home: dict[str, Any]) -> tuple[list[Trace], list[Trace], str]:
    """(each engine by itself, the two by turns, what is said of a folder that the other one has)."""
    options = [
        {
            "zero": {"level": level},
            "offload": home | ({"folder": f"{folder}/{level}"} if home["optimizer"] == "disk" else {}),
        }
        for level in (1, 3)
    ]
    alone = []
    for one in options:
        engine, trace = zero3d.Engine(small(), tiny.loss, config=one), Trace()
        trains(engine, trace)
        alone.append(Trace(numbers=trace.numbers, tensors=engine.full_state_dict()))
        engine.close()
    engines, together = [zero3d.Engine(small(), tiny.loss, config=one) for one in options], [Trace(), Trace()]
    refusal = ""
    try:
        zero3d.Engine(small(), tiny.loss, config=options[0])
    except zero3d.UsageError as error:
        refusal = str(error)
    for batch in batches():
        for engine, trace in zip(engines, together):
            trace.step(engine, tiny.part(batch, engine.rank, engine.world))
    for engine, trace in zip(engines, together):
        trace.tensors = engine.full_state_dict()
    return alone, together, refusal


@pytest.mark.parametrize("home", ["host", "disk"])
def test_two_engines_in_one_process(home: str, tmp_path: Path) -> None:
    for rank, (alone, together, refusal) in enumerate(run_ranks(2, two, str(tmp_path), {"optimizer": home})):
        for one, other in zip(alone, together):
            assert_same_bits(one, other, rank)
        if home == "disk":
            assert "in use by another run" in refusal and "offload.folder" in refusal and "rank-0000" in refusal
        else:
            assert not refusal
