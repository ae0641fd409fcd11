"""Every case, level, home, precision and `zero.reduce` of `tests/offload_cases.py`, by hand:

    python -m tests.offload_matrix [text that a line must have, such as "zbv" or "level 3 disk bf16"] ...

One line a run: "same bits" as the same run without offload, on every rank, and in fp32 the largest distance of a weight
from the plain loop's; or what went wrong. Ends with 1 where anything did. All runs take about ten minutes on two cores.
"""

import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence

import torch._dynamo  # noqa: F401  what every rank would import for itself
from torch import Tensor

from tests.offload_cases import CASES, Run, Trace, assert_close, assert_same_bits, every_run, plain, train
from tests.world import RankError, run_ranks

TOGETHER = 40
"""Runs in ranks that are forked once."""


def main(texts: Sequence[str]) -> int:
    runs = [run for run in every_run() if all(text in str(run) for text in texts)]
    [expected] = run_ranks(1, all_plain, {run.case for run in runs if CASES[run.case].close}, timeout=3000)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for world in sorted({run.world for run in runs}):
            chosen = [run for run in runs if run.world == world]
            for start in range(0, len(chosen), TOGETHER):
                some = chosen[start : start + TOGETHER]
                beside = list(dict.fromkeys(run.beside for run in some))
                ranks = _in_ranks(world, [*beside, *some], folder)
                without = dict(zip(beside, zip(*ranks)))
                for number, run in enumerate(some, start=len(beside)):
                    close = expected.get(run.case) if run.precision == "fp32" else None
                    found = told(run, [rank[number] for rank in ranks], without[run.beside], close)
                    wrong += not found.startswith("same bits")
                    print(f"{run}: {found}", flush=True)
    print(f"{len(runs)} runs, {wrong} wrong")
    return int(wrong > 0 or not runs)


def all_plain(names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    return {name: plain(name) for name in names}


def _in_ranks(world: int, runs: Sequence[Run], folder: str) -> list[list[Trace | str]]:
    try:
        return run_ranks(world, train_each, runs, folder, timeout=3000)
    except RankError as error:
        return [[str(error)] * len(runs)] * world


def train_each(runs: Sequence[Run], folder: str) -> list[Trace | str]:
    """What went wrong as a text."""
    found: list[Trace | str] = []
    for run in runs:
        try:
            found.append(train(run, folder))
        except Exception:  # whatever it is, it belongs to this run
            found.append(traceback.format_exc())
    return found


def told(run: Run, ranks: Sequence[Trace | str], without: Sequence[Trace | str], close: object) -> str:
    """One run in a few words."""
    for what, traces in (("", ranks), ("without offload: ", without)):
        for trace in traces:
            if isinstance(trace, str):
                return f"WRONG {what}{' '.join(trace.split())[-600:]}"
    try:
        for rank, (trace, other) in enumerate(zip(ranks, without)):
            assert_same_bits(trace, other, f"rank {rank}")  # type: ignore[arg-type]
        if close is not None:
            return f"same bits, {assert_close(ranks[0], close, 'the plain loop'):.0e} from the plain loop"  # type: ignore[arg-type]
    except AssertionError as error:
        return f"WRONG {' '.join(str(error).split())[:300]}"
    return "same bits"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
