"""What the parts of a model hold while they run, by `recompute.mode`.

It is found out for a mode when it is first asked for, as that takes longer than to count all else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from zero3d.planner.workload import Course

Courses = Sequence[Sequence[tuple[Course, Course]]]
"""For several numbers of samples, of each part (forward, backward)."""


class Held:
    """modes: there are; find: one of them -> its courses."""

    def __init__(self, modes: Sequence[str], find: Callable[[str], Courses]) -> None:
        self.modes = modes
        self._find = find
        self._found: dict[str, Courses] = {}

    def __getitem__(self, mode: str) -> Courses:
        if mode not in self._found:
            self._found[mode] = self._find(mode)
        return self._found[mode]


class OfPart(Mapping[str, tuple[Course, Course]]):
    """Those of part number `part`; `which` of the numbers of samples."""

    def __init__(self, held: Held, which: int, part: int) -> None:
        self._held, self._which, self._part = held, which, part

    def __getitem__(self, mode: str) -> tuple[Course, Course]:
        if mode not in self:
            raise KeyError(mode)
        return self._held[mode][self._which][self._part]

    def __contains__(self, mode: object) -> bool:
        return mode in self._held.modes

    def __iter__(self) -> Iterator[str]:
        return iter(self._held.modes)

    def __len__(self) -> int:
        return len(self._held.modes)
