"""Ending a run early and well: whoever is asked, all ranks end after the same step, and a checkpoint is saved.

A rank that is asked says so in the exchange that each step, and each batch of an evaluation, ends with. All ranks read
the same sums there, so they decide alike, and no call of its own is needed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zero3d.checkpoint.place import Url

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
"""What may ask a run to end, the one that counts first where there are several."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A run that was asked to end. `step`: the last that was made, of `steps`; `signal`: who asked; `checkpoint`: of
    that step, or None where none could be saved, and `why`."""

    step: int
    steps: int
    signal: str
    checkpoint: Path | Url | None
    why: str = ""

    @property
    def told(self) -> str:
        """One sentence for people."""
        how = "interrupted" if self.signal == "SIGINT" else f"stopped by {self.signal}"
        saved = f"saved {self.checkpoint}; --resume goes on from it" if self.checkpoint else self.why
        return f"{how} after step {self.step:,} of {self.steps:,}; {saved}"


class Asked(Protocol):
    """Whether somebody has asked this rank to end."""

    def listening(self) -> AbstractContextManager[None]:
        """Within, signals of `SIGNALS` are taken note of, and end nothing."""
        ...

    def by(self) -> Sequence[bool]:
        """Which of `SIGNALS` have come to this rank."""
        ...


class Nobody:
    """Nobody ever asks."""

    def listening(self) -> AbstractContextManager[None]:
        return nullcontext()

    def by(self) -> Sequence[bool]:
        return (False,) * len(SIGNALS)


def agreed(sums: Sequence[int]) -> str | None:
    """By which signal all ranks are to end, from the sums of what each was asked; None: by none."""
    return next((name for name, ranks in zip(SIGNALS, sums) if ranks), None)
