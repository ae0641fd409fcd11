"""Half an hour of `zero3d train` that saves in the background again and again, watched from outside:

    .venv/bin/python -m tests.soak [MINUTES] [SETTING ...]

Four ranks on one machine. Every five seconds each process is asked for its memory, files and threads. Prints a line a
rank: what it held after a fifth of the time, and at the end. Ends with 1 where memory grew by 1 % or more, where files
or threads did, or where anything is left once the run is over: a process, shared memory, a temporary file.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.command import ZERO3D, fill

EVERY = 5.0
GROWTH = 0.01
WARM_UP, END = 0.2, 0.2
"""Shares of the time."""
SETTINGS = (
    "parallel.dp=4",
    "zero.level=3",
    "model.width=128",
    "model.layers=4",
    "model.heads=4",
    "data.sequence_length=64",
    "data.global_batch=8",
    "run.steps=10000000",
    "checkpoint.every=40",
    "checkpoint.keep=2",
)
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Sample:
    """Of one process. bytes: resident memory that is its own alone"""

    bytes: int
    files: int
    threads: int


def sampled(pid: int) -> Sample | None:
    """None once it has ended."""
    process = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        own = int(status["RssAnon"].split()[0]) * 1024
        return Sample(own, len(os.listdir(process / "fd")), int(status["Threads"]))
    except (OSError, KeyError):
        return None


def children(pid: int) -> list[int]:
    """The processes that it has started, and those that these have."""
    try:
        return [one.pid for one in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def watch(process: "subprocess.Popen[bytes]", seconds: float) -> dict[int, list[Sample]]:
    """By process, the run's own first."""
    found: dict[int, list[Sample]] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        for pid in (process.pid, *children(process.pid)):
            if (sample := sampled(pid)) is not None:
                found.setdefault(pid, []).append(sample)
        left = end - time.monotonic()
        print(f"\r{left / 60:5.1f} minutes to go, {len(found)} processes", end="", file=sys.stderr, flush=True)
        time.sleep(min(EVERY, max(left, 0)))
    print(file=sys.stderr)
    return found


def told(samples: Sequence[Sample]) -> tuple[str, bool]:
    """(a line, whether it is well): medians after the warm-up beside those at the end."""
    warm, last = int(len(samples) * WARM_UP), max(int(len(samples) * END), 1)
    before, after = samples[warm : warm + last], samples[-last:]
    was, now = median(one.bytes for one in before), median(one.bytes for one in after)
    files = max(one.files for one in before), max(one.files for one in after)
    threads = max(one.threads for one in before), max(one.threads for one in after)
    well = now < was * (1 + GROWTH) and files[1] <= files[0] and threads[1] <= threads[0]
    text = f"memory {was / 1e6:.1f} -> {now / 1e6:.1f} MB ({now / was - 1:+.2%}), "
    return f"{text}files {files[0]} -> {files[1]}, threads {threads[0]} -> {threads[1]}", well


def soak(seconds: float, settings: Sequence[str]) -> bool:
    """Whether all is well."""
    shared = set(os.listdir(SHARED))
    with tempfile.TemporaryDirectory() as name:
        folder, temporary = fill(Path(name)), Path(name) / "tmp"
        temporary.mkdir()
        words = [*ZERO3D, "train", "tiny.toml", "--json", *(word for one in settings for word in ("--set", one))]
        environment = os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            process = subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=err)
            found = watch(process, seconds)
            process.send_signal(signal.SIGTERM)
            code = process.wait(120)
        watched = {pid: told(samples) for pid, samples in found.items() if len(samples) > 2}
        for pid, (text, _) in watched.items():
            print(f"{'the run' if pid == process.pid else 'a rank'}: {text}")
        events = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
        steps = [one["step"] for one in events if one["event"] == "step"]
        left = {
            "processes": [pid for pid in found if Path(f"/proc/{pid}").exists()],
            "shared memory": sorted(set(os.listdir(SHARED)) - shared),
            "temporary files": sorted(str(one.relative_to(temporary)) for one in temporary.rglob("*") if one.is_file()),
            "unfinished checkpoints": sorted(one.name for one in (folder / "out/checkpoints").glob(".*")),
        }
        kept = sorted(one.name for one in (folder / "out/checkpoints").iterdir())
        print(
            f"{len(steps)} steps in {seconds / 60:.0f} minutes, exit code {code}, checkpoints kept: {', '.join(kept)}"
        )
        print("left behind: " + (", ".join(f"{kind} {what}" for kind, what in left.items() if what) or "nothing"))
        if code:
            print((folder / "stderr").read_text()[-2000:])
    return (
        all(well for _, well in watched.values()) and len(watched) >= 5 and not any(left.values()) and steps[-1] > 100
    )


if __name__ == "__main__":
    minutes = float(sys.argv[1]) if sys.argv[1:] else 30.0
    sys.exit(not soak(minutes * 60, (*SETTINGS, *sys.argv[2:])))
