"""Bytes by rank and kind, from three sides: planned, rehearsed, measured; ranks that hold alike are told once. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zero3d.report.contents import Rehearsal, Run
from zero3d.report.lines import by_rank
from zero3d.report.plan_file import AWAY

Side = Literal["planned", "rehearsed", "measured"]
SIDES: tuple[Side, ...] = ("planned", "rehearsed", "measured")
WORDS: dict[Side, str] = {"planned": "model states", "rehearsed": "rehearsed", "measured": "measured"}
"""What people read: model states are all that is known before a run."""
KINDS = ("weights", "gradients", "optimizer", "activations", "buffers", *AWAY)
"""In the order in which they are stacked; what else a file has comes after."""

MOST_LISTED = 3
"""Ranks, or stretches of them, in a name."""


@dataclass(frozen=True)
class Held:
    """What each of some ranks, which are alike, holds: side -> kind -> bytes. A side that knows nothing of them is
    not there."""

    ranks: tuple[int, ...]
    sides: Mapping[Side, Mapping[str, int]]

    @property
    def name(self) -> str:
        """Such as `rank 3` or `ranks 0-3`."""
        return rank_names(self.ranks)


def holdings(run: Run) -> list[Held]:
    """Of every rank that some side knows of, in the order of ranks."""
    planned = run.plan.held_bytes if run.plan else {}
    measured = by_rank(run.metrics.done.get("held_bytes")) if run.metrics.done else {}
    rehearsed = _rehearsed(run.rehearsal) if run.rehearsal else {}
    world = max((len(numbers) for table in (planned, measured) for numbers in table.values()), default=0)
    found: dict[tuple[object, ...], tuple[list[int], dict[Side, dict[str, int]]]] = {}
    for rank in sorted({*range(world), *rehearsed}):
        sides: dict[Side, dict[str, int]] = {}
        for side, table in (
            ("planned", _of(planned, rank)),
            ("rehearsed", rehearsed.get(rank)),
            ("measured", _of(measured, rank)),
        ):
            if table:
                sides[side] = table  # type: ignore[index]
        key = tuple((side, kind, size) for side, table in sides.items() for kind, size in table.items())
        found.setdefault(key, ([], sides))[0].append(rank)
    return [Held(tuple(ranks), sides) for ranks, sides in found.values()]


def kinds_of(held: Sequence[Held]) -> list[str]:
    """Of which some rank holds something."""
    there = {kind for one in held for table in one.sides.values() for kind, size in table.items() if size}
    return [kind for kind in KINDS if kind in there] + sorted(there - {*KINDS})


def on_device(table: Mapping[str, int]) -> int:
    """Bytes of all kinds that are not away from it."""
    return sum(size for kind, size in table.items() if kind not in AWAY)


def rank_names(ranks: Sequence[int]) -> str:
    """Such as `rank 3`, `ranks 0-3` or `ranks 0, 2, 5-7`; of ranks that are apart the first few.

    >>> rank_names([3]), rank_names([0, 2, 5, 6, 7]), rank_names([*range(0, 512, 4)])
    ('rank 3', 'ranks 0, 2, 5-7', 'ranks 0, 4, 8 and 125 more')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    listed = runs[:MOST_LISTED]
    told = ", ".join("-".join(map(str, one)) for one in listed)
    more = len(ranks) - sum(one[-1] - one[0] + 1 for one in listed)
    return f"rank{'s' * (len(ranks) > 1)} {told}" + (f" and {more} more" if more else "")


def _of(table: Mapping[str, Sequence[int]], rank: int) -> dict[str, int]:
    return {kind: numbers[rank] for kind, numbers in table.items() if rank < len(numbers)}


def _rehearsed(found: Rehearsal) -> dict[int, dict[str, int]]:
    """host: of what the rank keeps away from its device, kinds together."""
    return {one.rank: one.peak_by_kind | ({"host": one.host_bytes} if one.host_bytes else {}) for one in found.ranks}
