"""Checksums of a file, chunk by chunk, so that a range of it can be checked without the rest. Pure.

The last tensor of each file is a table: crc32 of every `CHUNK` bytes before it, 4 bytes each, least significant first.
"""

import zlib
from collections.abc import Sequence
from typing import Final

CHUNK: Final = 1 << 12
"""Bytes: so few that a rank reads little that it does not want, so many that crc32 still runs at its full speed."""
ENTRY: Final = 4
TABLE: Final = "(checksums)"
"""The table's key in a file."""


def table_bytes(data: int) -> int:
    """Of the table of a file with `data` bytes before it."""
    return -(-data // CHUNK) * ENTRY


class Checksums:
    """Takes a file's bytes in order, in whatever portions."""

    def __init__(self) -> None:
        self._table = bytearray()
        self._open = 0
        self._room = CHUNK

    def add(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            portion = data[at : at + self._room]
            self._open = zlib.crc32(portion, self._open)
            self._room -= len(portion)
            at += len(portion)
            if not self._room:
                self._close()

    def table(self) -> bytes:
        """All of it; nothing is added after."""
        if self._room < CHUNK:
            self._close()
        return bytes(self._table)

    def _close(self) -> None:
        self._table += self._open.to_bytes(ENTRY, "little")
        self._open, self._room = 0, CHUNK


def first_wrong(table: Sequence[int], first: int, data: memoryview) -> int | None:
    """The chunk that is not what `table` says; None where all are. `data`: whole chunks from number `first` on, but for
    the file's last."""
    for number, start in enumerate(range(0, len(data), CHUNK), start=first):
        if zlib.crc32(data[start : start + CHUNK]) != table[number]:
            return number
    return None
