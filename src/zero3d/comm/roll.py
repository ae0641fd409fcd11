"""A roll call: before a call that all ranks must make, each finds out that all others have come to it.

Where some have not, nothing has begun that would have to be undone: the call has not been made, and training can go on.
"""

import time
from typing import Final

from zero3d.comm.process_axis import lookout_of_process
from zero3d.errors import DivergedError

FIRST, LONGEST = 0.001, 0.1
"""Seconds between two looks: at first, and when it takes long."""
PATIENCE: Final = 8.0
"""Seconds in which the last rank must have come."""


def call_roll(what: str, patience: float = PATIENCE) -> None:
    """Returns when all ranks of the process group have come here; at once where there is one rank alone.

    DivergedError: after `patience` seconds some had not. what: the call, such as "engine.save". Collective.
    """
    lookout = lookout_of_process()
    deadline, pause = time.monotonic() + patience, FIRST
    missing = lookout.here(what)
    while missing:
        if time.monotonic() > deadline:
            absent = lookout.absent(what)
            lookout.here(what, -1)
            raise DivergedError(
                _told(what, absent, patience, [lookout.doing(rank) for rank in absent]),
                hint="Call it on every rank, not under `if rank == 0`. Nothing has been done yet.",
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
        asked = time.monotonic()
        missing = lookout.here(what, 0)
        deadline += time.monotonic() - asked  # A store that is slow to answer is no rank that is late.


def _told(what: str, absent: list[int], patience: float, doing: list[str]) -> str:
    ranks = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))} have"
    return (
        f"{what} is collective, and {ranks} not called it within {patience:g} s"
        f"{''.join(f'; {one}' for one in doing[:4] if one)}"
    )
