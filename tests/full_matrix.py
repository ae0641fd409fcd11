"""Every layout, schedule, level, number of micro-batches and `zero.reduce` of `tests/pipeline_runs.py`, by hand:

    python -m tests.full_matrix [text that a line must have, such as "1 x 1 x 2" or "zbv level 3"] ...

One line a run: "same bits" as pp = 1, and the largest distance of its losses, norms and weights from the plain loop;
or what went wrong. Ends with 1 where anything did. All 1200 runs take about half an hour on two cores.
"""

import sys
from collections.abc import Sequence

from tests.pipeline_runs import (
    Run,
    Trace,
    assert_close,
    assert_same_bits,
    by_world,
    distance,
    every_run,
    plain,
    train_all,
)
from tests.world import run_ranks

TOGETHER = 40
"""Runs in ranks that are forked once."""


def main(texts: Sequence[str]) -> int:
    runs = [run for run in every_run() if all(text in str(run) for text in texts)]
    unstaged: dict[Run, Trace] = {}
    for world, chosen in by_world(dict.fromkeys(run.unstaged for run in runs)).items():
        unstaged.update(zip(chosen, run_ranks(world, train_all, chosen, timeout=3000)[0]))
    wrong = 0
    for world, chosen in by_world(runs).items():
        for start in range(0, len(chosen), TOGETHER):
            some = chosen[start : start + TOGETHER]
            ranks = run_ranks(world, train_all, some, timeout=3000)
            for number, run in enumerate(some):
                found = told(run, [traces[number] for traces in ranks], unstaged[run.unstaged])
                wrong += not found.startswith("same bits")
                print(f"{run}: {found}", flush=True)
    print(f"{len(runs)} runs, {wrong} wrong")
    return int(wrong > 0 or not runs)


def told(run: Run, ranks: Sequence[Trace], unstaged: Trace) -> str:
    """One run in a few words."""
    expected = plain(run.micro_batches * run.layout[0])
    first = ranks[0]
    try:
        for rank, trace in enumerate(ranks):
            assert_same_bits(trace, first, f"rank {rank}", norms=True)
        assert_same_bits(first, unstaged, "without stages")
        assert_close(first, expected, "the plain loop")
    except AssertionError as error:
        return f"WRONG {' '.join(str(error).split())[:200]}"
    pairs = [*zip(first.losses, expected.losses), *zip(first.norms, expected.norms)]
    off = max(abs(mine / theirs - 1) for mine, theirs in pairs)
    weights = max(distance(value, expected.weights[name]) for name, value in first.weights.items())
    return f"same bits, {max(off, weights):.0e} from the plain loop"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
