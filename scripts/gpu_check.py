"""What offload does on this machine: memory planned and measured, step times, overlap, and the largest model that fits.

    python scripts/gpu_check.py                            one process and one GPU, under 4 minutes
    torchrun --nproc-per-node 8 scripts/gpu_check.py       levels and offload on as many ranks as there are GPUs
    python scripts/gpu_check.py --cpu                      the same logic with tiny sizes

A GPT trains a few steps on the same batches at levels 0 to 3 and with offload. Then, with one process, its depth grows
until it no longer fits into a part of the device's memory, with and without offload; each try is a process of its own,
so that one that runs out of memory leaves nothing behind. A readable table goes to stderr; the last line of stdout is
all of it as JSON. What the time did not suffice for is told under "not_reached".

Peaks are torch.cuda.max_memory_allocated over the steps; on a CPU model states and activations, as the engine
counts them.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpu_runs import RUNS, Size, device_bytes, in_processes, in_this_process, job_of, planned_peak

SEARCHED = ("level 2", "level 2, host")

TABLE = Size(width=2048, layers=24, heads=16, vocabulary=32768, length=1024, batch=8)
DEEP = Size(width=1024, layers=1, heads=8, vocabulary=32768, length=1024, batch=2)
TINY_TABLE = Size(width=32, layers=3, heads=2, vocabulary=64, length=16, batch=2, bucket_mb=0.02)
TINY_DEEP = replace(TINY_TABLE, layers=1)
TINY_LIMIT = 800_000
"""Bytes in place of a part of a GPU's memory."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """`best` fits and `refused` does not, if one of those tried did not; complete: they are near enough."""

    best: int
    refused: int | None
    complete: bool
    trials: Sequence[tuple[int, bool | None]]


def main() -> None:
    options = arguments()
    began = time.monotonic()

    def left() -> float:
        return options.minutes * 60 - (time.monotonic() - began)

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    size = TINY_TABLE if options.cpu else TABLE
    jobs = [job_of(name, size, steps=options.steps, cpu=options.cpu, seconds=options.run_limit) for name in RUNS]
    answers = in_this_process(jobs, left) if ranks > 1 else in_processes(jobs, left)
    runs = [{"run": job["run"], **answer} for job, answer in answers]
    largest = [] if ranks > 1 else [search(name, options, left) for name in SEARCHED]
    if int(os.environ.get("RANK", "0")) == 0:
        reached = [one["run"] for one in runs if "not_reached" not in one]
        missed = [name for name in RUNS if name not in reached]
        missed += [f"largest, {one['run']}" for one in largest if not one["complete"]]
        missed += [f"largest, {name} (needs one process)" for name in SEARCHED if ranks > 1]
        done = [one for one in runs if "losses" in one]
        table = {
            "ranks": ranks,
            "model": asdict(size),
            "runs": [one for one in runs if "not_reached" not in one],
            "losses": compared(done),
            "largest": largest,
            "not_reached": missed,
            "seconds": round(time.monotonic() - began, 1),
        }
        print(readable(table), file=sys.stderr, flush=True)
        print(json.dumps(table), flush=True)
        sys.exit(0 if done else 2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.8, help="all of it together")
    parser.add_argument("--steps", type=int, default=4, help="that are measured, of each run")
    parser.add_argument("--fraction", type=float, default=0.04, help="of the device's memory, for the largest model")
    parser.add_argument("--run-limit", type=float, default=60.0, help="seconds for one run")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on this machine's CPU")
    return parser.parse_args()


def search(run: str, options: argparse.Namespace, left: Callable[[], float]) -> dict[str, Any]:
    """The largest depth that trains within the limit, begun where the plan says it is."""
    size = TINY_DEEP if options.cpu else DEEP
    limit = TINY_LIMIT if options.cpu else int(options.fraction * device_bytes(left))
    why: dict[int, str] = {}

    def fits(layers: int) -> bool | None:
        job = job_of(
            run,
            replace(size, layers=layers),
            steps=0,
            cpu=options.cpu,
            seconds=options.run_limit,
            limit=limit,
            fraction=options.fraction,
        )
        _, answer = next(in_processes([job], left))
        why[layers] = answer.get("refused") or answer.get("error") or answer.get("not_reached") or ""
        return True if "losses" in answer else False if "refused" in answer else None

    planned = deepest(lambda layers: planned_peak(run, replace(size, layers=layers), 1) <= limit)
    found = largest(fits, max(planned, 2), lambda: left() < 15)
    told = {number: why[number] for number, fitted in found.trials if not fitted}
    return {
        "run": run,
        "limit_bytes": limit,
        "planned_layers": planned,
        "layers": found.best,
        "parameters": replace(size, layers=found.best).parameters if found.best else 0,
        "refused_layers": found.refused,
        "why": told.get(found.refused or 0) or next(iter(told.values()), ""),
        "trials": [[number, fitted] for number, fitted in found.trials],
        "complete": found.complete,
    }


def deepest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, where asking costs nothing; 0 for none."""
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest(fits: Callable[[int], bool | None], guess: int, must_stop: Callable[[], bool]) -> Found:
    """The largest number that fits, to 3 %, where asking takes long: in steps of an eighth from `guess` until one fits
    and one does not, then by halves. `fits` gives None where nothing can be said: the search ends there."""
    best, refused = 0, None
    trials: list[tuple[int, bool | None]] = []
    number = guess
    while not must_stop():
        answer = fits(number)
        trials.append((number, answer))
        if answer is None:
            break
        best, refused = (number, refused) if answer else (best, number)
        if refused is None:
            number = best + max(best // 8, 1)
        elif refused - best <= max(best // 32, 1):
            return Found(best=best, refused=refused, complete=True, trials=trials)
        elif best == 0:
            number = refused - max(refused // 8, 1)
        else:
            number = (best + refused) // 2
    return Found(best=best, refused=refused, complete=False, trials=trials)


def compared(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Losses beside those of the first run; a delayed update trains with other weights and is left out."""
    alike = [one for one in runs if "delayed_update" not in one["offload"]]
    if not alike:
        return {"same_bits": [], "largest_difference": None}
    first = alike[0]["losses"]
    gaps = {
        one["run"]: max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(one["losses"], first)) for one in alike
    }
    return {"same_bits": [run for run, gap in gaps.items() if not gap], "largest_difference": max(gaps.values())}


def readable(table: Mapping[str, Any]) -> str:
    """Memory in GB of 10**9 bytes, or MB where all is small; times in milliseconds."""
    done = [one for one in table["runs"] if "losses" in one]
    small = all(one["measured_peak"] < 1e9 for one in done)
    unit, scale = ("MB", 1e6) if small else ("GB", 1e9)
    lines = [
        f"{'run':28} {f'states {unit}':>9} {'held':>7} {f'peak {unit}':>8} {'planned':>8} {f'host {unit}':>8} "
        f"{'pinned':>7} {'step ms':>8} {'down':>7} {'update':>7} {'up':>7} {'hidden':>7}"
    ]
    for one in table["runs"]:
        if "losses" not in one:
            lines.append(f"{one['run']:28} {one.get('error') or one.get('refused')}")
            continue
        sizes = [one[key] / scale for key in ("planned_states", "held_states", "measured_peak", "planned_peak")]
        sizes += [one["host"] / scale, one["pinned"] / scale]
        times = [1e3 * one["step_seconds"], *(1e3 * one["split"][key] for key in ("down", "update", "up", "hidden"))]
        widths = (9, 7, 8, 8, 8, 7, 8, 7, 7, 7, 7)
        cells = (f"{value:{width}.2f}" for value, width in zip(sizes + times, widths))
        lines.append(f"{one['run']:28} {' '.join(cells)}")
    for one in table["largest"]:
        lines.append(
            f"largest at {one['limit_bytes'] / scale:.3f} {unit}, {one['run']}: {one['layers']} layers, "
            f"{one['parameters'] / 1e6:.1f} M parameters (planned {one['planned_layers']} layers; "
            f"{one['refused_layers']} refused: {one['why'] or 'none'})"
        )
    lines += [f"not reached: {name}" for name in table["not_reached"]]
    lines.append(f"losses: {table['losses']}; {table['seconds']} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
