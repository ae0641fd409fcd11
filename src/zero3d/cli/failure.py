"""From what failed ranks left behind to the one text that a user reads.

A rank writes its error as JSON (rank.py). One that was killed writes nothing, and those that waited for it
write that it is gone: the cause is told from its echoes here.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero3d.cli.signals import exit_code
from zero3d.errors import DISK_FULL, OutOfSpaceError, RankFailedError, UsageError, Zero3dError

LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused")
"""How back ends say that another rank is gone."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's end: its exit code (negative: a signal), the JSON it wrote, the end of what it printed."""

    rank: int
    code: int
    written: dict[str, Any] | None = None
    last_words: str = ""


class Interrupted(KeyboardInterrupt):
    """A signal ended the ranks, or this process before there were any. `step`: the last that was done, None before the
    first; `end`: the event of a run that ended well as it was asked to, else None; `told`: for the user."""

    def __init__(self, signal_name: str, step: int | None = None, end: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.signal_name = signal_name
        self.step = step
        self.end = end
        how = "interrupted" if signal_name == "SIGINT" else f"ended by {signal_name}"
        self.told = f"{how} before the first step was done" if step is None else f"{how} after step {step:,}"

    @property
    def exit_code(self) -> int:
        return exit_code(self.signal_name, saved=self.end is not None and self.end.get("checkpoint") is not None)


class ReportedError(Zero3dError):
    """An error as a rank described it; `trace` is its traceback."""

    def __init__(self, message: str, *, exit_code: int, hint: str = "", where: str = "", trace: str = "") -> None:
        super().__init__(message, hint=hint, where=where)
        self.exit_code = exit_code
        self.trace = trace


def describe(error: BaseException, rank: int, seconds: float, trace: str) -> dict[str, Any]:
    """What a rank writes about its error. The outer form is that of torch's elastic error files."""
    known = as_known(error)
    told = {
        "echo": is_echo(error),
        "message": known.message,
        "where": known.where,
        "hint": known.hint,
        "exit_code": known.exit_code,
        "rank": rank,
        "seconds": seconds,
        "trace": trace,
    }
    extra = {"py_callstack": trace, "timestamp": str(int(seconds))}
    return {"message": {"message": str(known), "extraInfo": extra}, "zero3d": told}


def is_echo(error: BaseException) -> bool:
    """Whether it says no more than that another rank does not answer."""
    text = str(error).lower() if not isinstance(error, OSError) else ""
    return isinstance(error, RankFailedError) or any(words in text for words in LOST)


def as_known(error: BaseException) -> Zero3dError:
    """An error from anywhere as one of ours."""
    if isinstance(error, Zero3dError):
        return error
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return OutOfSpaceError(
            f"out of memory: {text.splitlines()[0] if text else 'no more to be had'}",
            hint='Set parallel.micro_batch smaller, zero.level = 3, or recompute.mode = "block".',
        )
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return OutOfSpaceError(f"no space left: {text}", hint="Free some, or set run.out to another disk.")
    if isinstance(error, BrokenPipeError):
        return Zero3dError(
            "nobody reads the output any more, so the run has stopped",
            hint="Send the output to a file, or go on with --resume.",
        )
    return RankFailedError(
        f"{type(error).__name__}: {text}" if text else type(error).__name__,
        hint="Run again with --debug for the traceback.",
    )


def root_cause(failures: Sequence[Failure]) -> ReportedError | None:
    """The one to report: a rank that was killed, else the earliest error that is no echo of another's."""
    killed = [one for one in failures if one.code < 0 and one.written is None]
    silent = [one for one in failures if one.code > 0 and one.written is None]
    if killed:
        return _killed(killed[0])
    told = sorted(
        (one.written["zero3d"] for one in failures if one.written and "zero3d" in one.written),
        key=lambda one: (one["echo"], one["seconds"]),
    )
    if silent and (not told or told[0]["echo"]):
        return _silent(silent[0])
    if not told:
        return None
    first = told[0]
    # What is wrong with the input is no single rank's.
    rank = f"rank {first['rank']}" if first["exit_code"] != UsageError.exit_code else ""
    place = ", ".join(part for part in (rank, first["where"]) if part)
    return ReportedError(
        first["message"], where=place, hint=first["hint"], exit_code=first["exit_code"], trace=first["trace"]
    )


def _killed(one: Failure) -> ReportedError:
    try:
        name = signal.Signals(-one.code).name
    except ValueError:
        name = f"signal {-one.code}"
    hints = {
        "SIGKILL": "If nobody did this, the system was out of memory: use fewer ranks, a smaller "
        "parallel.micro_batch or zero.level = 3.",
        "SIGSEGV": "A crash in native code; run again with --debug to see what it printed.",
    }
    return ReportedError(
        f"rank {one.rank} was ended by {name}; the others were stopped",
        exit_code=RankFailedError.exit_code,
        hint=hints.get(name, "The run has stopped; what was written so far is in run.out."),
        trace=one.last_words,
    )


def _silent(one: Failure) -> ReportedError:
    return ReportedError(
        f"rank {one.rank} ended with code {one.code} and did not say why",
        exit_code=RankFailedError.exit_code,
        hint=one.last_words or "Run again with --debug to see all that it prints.",
        trace=one.last_words,
    )
