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
            if self._room == CHUNK and len(data) - at >= CHUNK:
                at = self._add_whole(data, at)
                continue
            portion = data[at : at + self._room]
            self._open = zlib.crc32(portion, self._open)
            self._room -= len(portion)
            at += len(portion)
            if not self._room:
                self._close()

    def _add_whole(self, data: memoryview, at: int) -> int:
        """All whole chunks from `at` on. -> where they end."""
        end = len(data) - (len(data) - at) % CHUNK
        crc32 = zlib.crc32
        for start in range(at, end, CHUNK):
            self._table += crc32(data[start : start + CHUNK]).to_bytes(ENTRY, "little")
        return end

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
    crc32 = zlib.crc32
    found = [crc32(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK)]
    expected = table[first : first + len(found)]
    return next((first + at for at, (one, other) in enumerate(zip(found, expected)) if one != other), None)
