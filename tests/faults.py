"""Faults by hand: `python -m tests.faults 100 [SEED] [KIND ...]` disturbs so many runs of `zero3d train`.

Each run is disturbed once, at a moment drawn from the seed: at its start, in a step, in a save, or when it is resumed;
at a ZeRO level drawn too. It goes on, is started again by the launcher, or ends with one error on each machine and is
resumed without the fault. It is good if in the end the losses of all steps are those of a run that nobody disturbed
(1e-5), if an error that is expected says what it should and all ranks have ended soon after the time-out, and if every
checkpoint that is there after the fault is whole, to the checksum. Prints a row a run.

    kill      SIGKILL to one rank                              started again
    stop      SIGSTOP to one rank, for good                    started again after the time-out
    cut       the link of a machine goes down, for good        an error on each machine
    blink     the link of a machine is down for two seconds    goes on
    slow      the link of a machine sends 300 kbit/s           goes on
    full      the disk of run.out is full                      an error
    data      the machine of one rank has another text         an error before the first step
    skip      one rank leaves blocks out, once, at level 3     an error that names the ranks and a block; or goes on,
                                                               with the losses that level 0 has then
    nan       one rank's forward gives NaN from then on        an error that names the rank and the block
    blip      one rank's forward gives NaN once                an error that names the rank
    clock     the clock of a rank jumps, by up to a day        goes on

It needs root, for links and disks, and a C compiler, for clocks.
"""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import fault_clock, hosts
from tests.fault_machines import SHUTDOWN, Machine, free_endpoint
from tests.fault_runs import INSIDE, fill_with_model, is_saving, losses, troubles

STEPS, EVERY, TIMEOUT = 16, 4, 8
ERROR_SECONDS = TIMEOUT + SHUTDOWN + 15
"""From a fault to the end of all ranks: the time-outs, and what ending takes on two cores that others use too."""
PATIENCE = 60.0
"""A run that takes longer hangs."""
AGAIN = 3
"""How often the launcher may start ranks again."""
SETTINGS: dict[str, object] = {
    "run.steps": 1000,
    "run.timeout_seconds": TIMEOUT,
    "checkpoint.every": EVERY,
    "model.path": "faulty:build",
}
ALWAYS = ("start", "step", "save", "resume")
MOMENTS = {
    "kill": ALWAYS,
    "stop": ALWAYS,
    "cut": ALWAYS,
    "blink": ALWAYS,
    "slow": ALWAYS,
    "full": ("step", "save"),
    "data": ("start", "resume"),
    "skip": ("step",),
    "nan": ("step",),
    "blip": ("step",),
    "clock": ("start", "step", "save"),
}
SECONDS = {"start": 3.0, "resume": 3.0, "step": 0.3, "save": 0.05}
"""The fault comes at most so long after what begins its moment."""
SAYS = {
    "cut": r"is gone|time-out|has not answered|cannot be reached|did not come|does not answer",
    "full": r"[Nn]o space left|MB are free",
    "data": r"rank 1 has other tokens than rank 0",
    "skip": r"(?=.*rank 0)(?=.*rank 1).*blocks\.\d",
    "nan": r"rank 1: .*blocks\.\d",
    "blip": r"rank 1",
}
"""What is in the error of a kind that ends the run."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """How a run is disturbed, and when."""

    kind: str
    moment: str
    step: int
    rank: int
    level: int
    block: int
    delay: float
    jump: float

    @classmethod
    def of(cls, kind: str, seed: int) -> "Drawn":
        draw = random.Random(f"{kind} {seed}")
        moment = draw.choice(MOMENTS[kind])
        return cls(
            kind=kind,
            moment=moment,
            step=draw.randrange(2, STEPS - 5),
            rank=draw.randrange(2),
            level=3 if kind == "skip" else draw.randrange(4),
            block=draw.randrange(3),
            delay=draw.random() * SECONDS[moment],
            jump=draw.choice([-86400.0, -3600.0, -60.0, 60.0, 3600.0, 86400.0]),
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`ended`: with an error; `codes`: by machine, None where it ran on until the steps were done; `errors`: of all
    machines; `wrong`: what is not as it should be; `seconds`: from the fault to the end of all ranks, or to the last of
    the steps."""

    drawn: Drawn
    ended: bool
    codes: Sequence[int | None]
    resumed: bool
    errors: Sequence[str]
    wrong: Sequence[str]
    seconds: float

    @property
    def good(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        drawn = self.drawn
        how = "; ".join(self.wrong) or ("resumed, equal" if self.resumed else "went on, equal")
        when = f"{drawn.moment}, step {drawn.step}, level {drawn.level}, rank {drawn.rank}"
        errors = " // ".join(error[:260] for error in self.errors)
        return f"| {drawn.kind} | {when} | {self.seconds:.1f} s | {how} | {self.codes} {errors} |"


def plain(folder: Path, drawn: Drawn | None = None) -> dict[int, float]:
    """The losses of a run at level 0 that nobody disturbed, but its own model as `drawn`."""
    wrong = undisturbed(_filled(folder, drawn), 0, STEPS)
    assert not wrong, wrong
    return {step: loss for step, loss in losses(folder).items() if step <= STEPS}


def undisturbed(folder: Path, level: int, step: int) -> str:
    """A run, or what is left of one, until `step` is done. -> what went wrong."""
    machine = Machine(folder, words(level), free_endpoint())
    try:
        if until([machine], lambda: has_made(folder, step)):
            return ""
        return f"without a fault the run ended: {machine.told()[-3:]}"
    finally:
        machine.end()


def disturb(folder: Path, kind: str, seed: int, expected: dict[int, float] | None = None) -> Outcome:
    """One run in `folder`, which is empty. expected: what `plain` gave."""
    if expected is None:
        (folder / "plain").mkdir()
        expected = plain(folder / "plain")
    drawn = Drawn.of(kind, seed)
    wrong: list[str] = []
    with _disk(folder / "out") if kind == "full" else nullcontext():
        fill_with_model(folder)
        if drawn.moment == "resume":
            wrong.append(undisturbed(folder, drawn.level, drawn.step))
        outcome = _disturbed(folder, drawn, wrong)
        wrong += troubles(folder / "out/checkpoints")
        if outcome.ended:
            (folder / "out/filler").unlink(missing_ok=True)
            fill_with_model(folder)
            wrong.append(undisturbed(folder, drawn.level, STEPS))
        elif kind == "skip":
            expected = plain(folder / "level0", drawn)
        found = losses(folder)
    wrong += [f"step {step} is another one" for step in expected if not _is_close(found.get(step), expected[step])]
    wrong[:] = [one for one in wrong if one]
    return outcome


def _filled(folder: Path, drawn: Drawn | None = None) -> Path:
    if drawn is None or drawn.kind not in INSIDE:
        return fill_with_model(folder)
    return fill_with_model(folder, drawn.kind, drawn.step, drawn.block)


def _disturbed(folder: Path, drawn: Drawn, wrong: list[str]) -> Outcome:
    _filled(folder, drawn)
    with _machines(folder, drawn) as machines:
        began = time.monotonic()
        if drawn.kind not in (*INSIDE, "data"):
            if not _comes(folder, drawn, machines):
                wrong.append(f"the moment never came: {[one.told()[-2:] for one in machines]}")
            began = time.monotonic()
            _strike(folder, drawn, machines)
        if drawn.kind == "skip":
            until(machines, lambda: has_made(folder, STEPS))
            time.sleep(0.5)
        ends = drawn.kind in SAYS and (drawn.kind != "skip" or not has_made(folder, STEPS))
        codes: list[int | None]
        if ends:
            deadline = time.monotonic() + PATIENCE
            codes = [one.wait(deadline) for one in machines]
            ended = time.monotonic()
            metrics = folder / "out/metrics.jsonl"
            if drawn.kind in INSIDE and metrics.exists():  # The step before it was the last that was told.
                began = ended - (time.time() - metrics.stat().st_mtime)
            wrong += _unlike(drawn.kind, machines, ended - began)
        else:
            if not until(machines, lambda: has_made(folder, STEPS)):
                wrong.append(f"step {STEPS} was not made: {[one.told()[-2:] for one in machines]}")
            codes, ended = [one.poll() for one in machines], time.monotonic()
        told = [line for one in machines for line in one.told()]
    return Outcome(
        drawn=drawn,
        ended=ends,
        codes=codes,
        resumed=ends or any("goes on from" in line for line in told),
        errors=[error for one in machines for error in one.errors()],
        wrong=wrong,
        seconds=ended - began,
    )


@contextmanager
def _machines(folder: Path, drawn: Drawn) -> Iterator[list[Machine]]:
    """Two of one rank each where the fault is one of a machine, else one of two ranks."""
    made: list[Machine] = []
    line = words(drawn.level)
    linked = drawn.kind in ("cut", "blink", "slow")
    with hosts.hosts(2) if linked else nullcontext(["", ""]) as names:
        try:
            if linked or drawn.kind == "data":
                endpoint = f"{hosts.address(0)}:{hosts.PORT}" if linked else free_endpoint()
                for node, name in enumerate(names):
                    place, more = folder, line
                    if drawn.kind == "data" and node == 1:
                        place = fill_with_model(folder / "other")
                        (place / "text.py").write_text((place / "text.py").read_text().replace("f7", "f8"))
                        more = [*line, "--set", f"run.out={folder / 'out'}"]
                    made.append(Machine(place, more, endpoint, node=node, nodes=2, ranks=1, host=name))
            elif drawn.kind == "clock":
                made.append(Machine(folder, line, "", preloaded=fault_clock.build(folder)))
            else:
                restarts = AGAIN if drawn.kind in ("kill", "stop") else 0
                made.append(Machine(folder, line, free_endpoint(), restarts=restarts))
            yield made
        finally:
            for machine in made:
                machine.end()


def _comes(folder: Path, drawn: Drawn, machines: Sequence[Machine]) -> bool:
    """Waits for the moment of the fault."""
    if drawn.moment in ("start", "resume") and drawn.kind != "clock":
        comes = until(machines, lambda: all(one.pid(rank) is not None for one in machines for rank in one.ranks))
    else:
        comes = drawn.moment == "start" or until(machines, lambda: has_made(folder, drawn.step))
    if drawn.moment == "save":
        comes = until(machines, lambda: is_saving(folder))
    time.sleep(drawn.delay)
    return comes


def _strike(folder: Path, drawn: Drawn, machines: Sequence[Machine]) -> None:
    host = machines[drawn.rank % len(machines)].host
    if drawn.kind in ("kill", "stop"):
        os.kill(machines[0].pid(drawn.rank) or 0, signal.SIGKILL if drawn.kind == "kill" else signal.SIGSTOP)
    elif drawn.kind == "cut":
        hosts.cut(host)
    elif drawn.kind == "blink":
        hosts.cut(host)
        time.sleep(2)
        hosts.mend(host)
    elif drawn.kind == "slow":
        hosts.slow_down(host, "300kbit")
    elif drawn.kind == "full":
        with open(folder / "out/filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(1 << 14))
            except OSError:
                pass
    elif drawn.kind == "clock":
        fault_clock.jump(folder, drawn.rank, drawn.jump)


@contextmanager
def _disk(place: Path) -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _unlike(kind: str, machines: Sequence[Machine], seconds: float) -> list[str]:
    """What is not as it should be where an error should have ended the run."""
    found = [f"ranks {left} live on" for one in machines if (left := one.alive())]
    found += [f"machine {node} ended with {one.poll()}" for node, one in enumerate(machines) if not one.poll()]
    for node, one in enumerate(machines):
        errors = one.errors()
        if len(errors) != 1 or not re.search(SAYS[kind], errors[0]):
            found.append(f"machine {node} told {errors or one.told()[-5:]}")
    limit = ERROR_SECONDS + (PATIENCE / 3 if kind == "data" else 0)  # Ranks compare texts once they have started.
    return [*found, *([f"took {seconds:.1f} s"] if seconds > limit else [])]


def words(level: int, **more: Any) -> list[str]:
    settings = {**SETTINGS, "zero.level": level, **more}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["train", "tiny.toml", "--resume", "--allow-code", *sets]


def until(machines: Sequence[Machine], seen: Callable[[], bool]) -> bool:
    """Waits for something. False: a machine ended, or it took too long."""
    deadline = time.monotonic() + PATIENCE
    while not seen():
        if time.monotonic() > deadline or any(one.poll() is not None for one in machines):
            return seen()
        time.sleep(0.002)
    return True


def has_made(folder: Path, step: int) -> bool:
    return max(losses(folder), default=0) >= step


def _is_close(found: float | None, expected: float) -> bool:
    return found is not None and abs(found - expected) <= 1e-5 * abs(expected)


def main(number: int, seed: int, kinds: Sequence[str]) -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        expected = plain(Path(name))
    for one in range(number):
        with tempfile.TemporaryDirectory() as name:
            outcome = disturb(Path(name), kinds[one % len(kinds)], seed + one, expected)
        bad += not outcome.good
        print(outcome, flush=True)
    print(f"{number} runs, {bad} not as they should be", flush=True)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, sys.argv[3:] or list(MOMENTS)))
