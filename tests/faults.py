"""Faults by hand: `python -m tests.faults 20 [SEED]` disturbs so many runs of `zero3d train` under torchrun.

Each run is disturbed once, at a moment drawn from the seed, and ends as it should: resumed, with the losses of a run
that nobody disturbed (1e-5), or with one error on each machine, within the time-out. Prints a table, one row a run.
`cut` needs test hosts (tests/hosts.py), `full` the right to mount.

    kill      SIGKILL to one rank                        resumed
    stop      SIGSTOP to one rank, beyond the time-out   resumed
    nan       one rank's forward gives NaN               an error that names it
    skip      one rank leaves a block out, at level 3    an error that names both ranks
    full      the disk of run.out is full                an error
    cut       the link of a machine goes down            an error on each machine
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests import hosts
from tests.command import ZERO3D, fill

STEPS, EVERY, TIMEOUT = 40, 5, 15
ENDS = TIMEOUT + 30 + 25
"""Seconds from a fault to the end of all: the time-out, what torchrun gives a rank that does not end, new starts."""
RESUMED = ("kill", "stop")
KINDS = (*RESUMED, "nan", "skip", "full", "cut")
TORCHRUN = [ZERO3D[0], "-m", "torch.distributed.run"]
SETTINGS = (f"run.stop_after={STEPS}", "run.steps=1000", f"checkpoint.every={EVERY}", f"run.timeout_seconds={TIMEOUT}")
MODEL = """
import os
import torch
from torch import nn


class Block(nn.Linear):
    def forward(self, x):
        at, rank = self.calls, int(os.environ["RANK"])
        self.calls += 1
        if at == AT and rank == 1 and FAULT == "skip":
            return x
        y = x + super().forward(x).tanh()
        return y * float("nan") if at >= AT and rank == 1 and FAULT == "nan" else y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Embedding(256, 32), nn.Linear(32, 256)
        self.blocks = nn.ModuleList(Block(32, 32) for _ in range(3))
        for block in self.blocks:
            block.calls = 0

    def forward(self, tokens):
        x = self.enter(tokens)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


build = Net
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    kind: str
    step: int
    codes: list[int]
    resumed: bool
    equal: bool
    errors: list[str]
    seconds: float

    @property
    def good(self) -> bool:
        if self.kind in RESUMED:
            return self.resumed and self.equal and not any(self.codes)
        return all(self.codes) and len(self.errors) == len(self.codes) and self.seconds < ENDS


def words(*settings: str, more: tuple[str, ...] = ()) -> list[str]:
    sets = [word for one in (*SETTINGS, *settings) for word in ("--set", one)]
    return ["-m", "zero3d", "train", "tiny.toml", "--resume", *more, *sets]


def losses(folder: Path, out: str = "out") -> dict[int, float]:
    """Of the steps told so far."""
    found = {}
    try:
        lines = (folder / out / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # being written
            continue
        if event["event"] == "step":
            found[event["step"]] = event["loss"]
    return found


def ranks_of(launcher: int) -> list[int]:
    """Processes that torchrun has started, by their number."""
    found = []
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"zero3d" in command:
            found.append(int(child))
    return found


def until_step(folder: Path, step: int, process: "subprocess.Popen[bytes]", seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while max(losses(folder), default=0) < step:
        if time.monotonic() > deadline or process.poll() is not None:
            raise AssertionError(f"step {step} was not reached: {process.poll()}")
        time.sleep(0.002)


def plain(folder: Path, *, ranks: int = 2) -> dict[int, float]:
    """The losses that nobody disturbed; run once in a folder."""
    if not (folder / "plain").exists():
        sets = [word for one in (*SETTINGS, "run.out=plain") for word in ("--set", one)]
        subprocess.run(
            [*ZERO3D, "train", "tiny.toml", "-n", str(ranks), *sets],
            cwd=folder,
            check=True,
            timeout=200,
            capture_output=True,
        )
    return losses(folder, "plain")


def disturb(folder: Path, kind: str, seed: int) -> Outcome:
    """One run in `folder`, which `tests.command.fill` has filled."""
    drawn = random.Random(f"{kind} {seed}")
    step, rank, delay = drawn.randrange(3, STEPS - 8), drawn.randrange(2), drawn.random() * 0.02
    expected = plain(folder) if kind in RESUMED else {}
    settings: list[str] = []
    more: tuple[str, ...] = ()
    if kind in ("nan", "skip"):
        (folder / "faulty.py").write_text(f"FAULT, AT = {kind!r}, {step}\n{MODEL}")
        settings += ["model.path=faulty:build", "zero.level=3"]
        more = ("--allow-code",)
    if kind == "full":
        (folder / "out").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder / "out")], check=True)
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(folder), str(Path.cwd())]))
    try:
        if kind == "cut":
            return _cut(folder, step, env)
        restarts = 3 if kind in RESUMED else 0
        launch = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
        with (folder / "told").open("w") as told:
            process = subprocess.Popen(
                [*launch, *words(*settings, more=more)], cwd=folder, env=env, stdout=told, stderr=told,
                start_new_session=True,
            )  # fmt: skip
            began = time.monotonic()
            try:
                if kind in RESUMED:
                    until_step(folder, step, process)
                    time.sleep(delay)
                    began = time.monotonic()
                    os.kill(ranks_of(process.pid)[rank], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                code = process.wait(timeout=240)
            finally:
                _end(process)
    finally:
        if kind == "full":
            subprocess.run(["umount", str(folder / "out")], check=True)
    return _outcome(folder, kind, step, [code], ["told"], began, expected)


def _cut(folder: Path, step: int, env: dict[str, str]) -> Outcome:
    env.pop("GLOO_SOCKET_IFNAME", None)
    with hosts.hosts(2) as names:
        processes = []
        for number, name in enumerate(names):
            meet = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", hosts.address(0)]
            launch = ["ip", "netns", "exec", name, *TORCHRUN, *meet, "--master-port", str(hosts.PORT)]
            with (folder / f"told{number}").open("w") as told:
                processes.append(
                    subprocess.Popen(
                        [*launch, *words()], cwd=folder, env=env, stdout=told, stderr=told, start_new_session=True
                    )
                )
        try:
            until_step(folder, step, processes[0])
            hosts.cut(names[1])
            began = time.monotonic()
            codes = [process.wait(timeout=ENDS) for process in processes]
        finally:
            for process in processes:
                _end(process)
    return _outcome(folder, "cut", step, codes, ["told0", "told1"], began, {})


def _outcome(
    folder: Path, kind: str, step: int, codes: list[int], told: list[str], began: float, expected: dict[int, float]
) -> Outcome:
    found = losses(folder)
    text = [line for name in told for line in (folder / name).read_text().splitlines()]
    return Outcome(
        kind=kind,
        step=step,
        codes=codes,
        resumed=any("goes on from" in line for line in text)
        or "goes on from" in ((folder / "out/metrics.jsonl").read_text() if expected else ""),
        equal=set(found) == set(expected)
        and all(abs(found[one] - expected[one]) <= 1e-5 * abs(expected[one]) for one in expected),
        errors=[line for line in text if line.startswith("zero3d: rank")],
        seconds=time.monotonic() - began,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """torchrun, and the ranks, each of which is in a session of its own."""
    for pid in [*(ranks_of(process.pid) if process.poll() is None else []), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def main(number: int, seed: int) -> int:
    bad = 0
    for one in range(number):
        kind = KINDS[one % len(KINDS)]
        with tempfile.TemporaryDirectory() as name:
            outcome = disturb(fill(Path(name)), kind, seed + one)
        bad += not outcome.good
        first = outcome.errors[0] if outcome.errors else ""
        how = "resumed, equal" if outcome.good and kind in RESUMED else f"{len(outcome.errors)} errors: {first}"
        print(
            f"| {kind} | {outcome.step} | {outcome.codes} | {outcome.seconds:.0f} s | {how} | {outcome.good} |",
            flush=True,
        )
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
