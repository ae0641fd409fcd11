"""What is read next, told a little ahead of time: the disk brings it while what came before is checked. Pure."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

AHEAD: Final = 1 << 24
"""Bytes that a disk may be ahead by: some milliseconds of a fast one."""
PORTION: Final = 1 << 22
"""Bytes that are told at a time, at the least: a call for each small range would cost more than it saves."""


class Ahead:
    """ranges: (start, stop) in bytes, in rising order, taken one by one; tell: `tell(start, length)`."""

    def __init__(self, ranges: Iterable[tuple[int, int]], tell: Callable[[int, int], None]) -> None:
        self._ranges = _joined(ranges)
        self._tell = tell
        self._start, self._stop = next(self._ranges, (0, 0))

    def reading(self, offset: int) -> None:
        """Byte `offset` is about to be read: what comes within `AHEAD` of it is told."""
        limit = offset + AHEAD
        while self._start < self._stop and self._start + PORTION <= limit:
            end = min(self._stop, limit)
            self._tell(self._start, end - self._start)
            self._start = end
            if self._start == self._stop:
                self._start, self._stop = next(self._ranges, (0, 0))


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """With what lies a little apart joined."""
    begun: tuple[int, int] | None = None
    for start, stop in ranges:
        if begun and start - begun[1] <= PORTION // 64:
            begun = begun[0], max(begun[1], stop)
            continue
        if begun:
            yield begun
        begun = start, stop
    if begun:
        yield begun
