"""Pipeline stages: one GPT over dp x tp x pp with every schedule, beside a plain loop and beside no stages.

Bit-equal: all ranks; and, clipping off and no ties, losses, gradients and weights of pp = 1 at the same dp, tp and
`zero.reduce`, whatever the level. Close: norms, which stages sum in other groups (1e-6), and the plain loop (1e-5).

Here every value of layout, schedule, level, number of micro-batches and `zero.reduce` meets every value of each other
one. All of their products: `python -m tests.full_matrix`.
"""

from functools import cache

import pytest

from tests.pipeline_runs import (
    LAYOUTS,
    LEVELS,
    MICRO_BATCHES,
    REDUCES,
    SCHEDULES,
    Run,
    Trace,
    all_pairs,
    assert_close,
    assert_same_bits,
    by_world,
    plain,
    train_all,
)
from tests.world import run_ranks

pytestmark = pytest.mark.ranks


@cache
def runs() -> tuple[Run, ...]:
    return tuple(all_pairs())


@cache
def unstaged(world: int) -> dict[Run, Trace]:
    """Those of `runs` without stages, on `world` ranks."""
    chosen = list(dict.fromkeys(run.unstaged for run in runs() if run.unstaged.world == world))
    return dict(zip(chosen, run_ranks(world, train_all, chosen, timeout=240)[0]))


def test_every_pair_of_values_is_run() -> None:
    found = {(run.layout, run.schedule) for run in runs()}
    assert found == {(layout, schedule) for layout in LAYOUTS for schedule in SCHEDULES}
    assert {(run.schedule, run.level) for run in runs()} == {(one, level) for one in SCHEDULES for level in LEVELS}
    counts = {(run.schedule, run.micro_batches) for run in runs()}
    assert counts == {(one, number) for one in SCHEDULES for number in MICRO_BATCHES}
    assert {(run.level, run.reduce) for run in runs()} == {(level, one) for level in LEVELS for one in REDUCES}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_stages_train_as_the_plain_loop_and_as_no_stages(world: int) -> None:
    chosen = by_world(runs())[world]
    ranks = run_ranks(world, train_all, chosen, timeout=240)
    for number, run in enumerate(chosen):
        trace: Trace = ranks[0][number]
        for rank, found in enumerate(ranks):
            assert_same_bits(found[number], trace, (str(run), rank), norms=True)
        assert_close(trace, plain(run.micro_batches * run.layout[0]), run)
        assert_same_bits(trace, unstaged(run.unstaged.world)[run.unstaged], run)
