"""Ranges of files, checked as they are read: a rank reads the chunks that it wants something of, and no others.

What is one run of bytes is read where it is wanted; the rest, and chunks that are wanted in part, into one small buffer
and copied from there. A mapped file would save that copy, and end the process where the file is cut short or its disk
fails; so would an error not be one that can be told.
"""

import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from zero3d.checkpoint.ahead import Ahead
from zero3d.checkpoint.chunks import CHUNK, ENTRY, first_wrong
from zero3d.checkpoint.folders import check_size
from zero3d.checkpoint.manifest import OTHER, File, Manifest
from zero3d.checkpoint.place import Place
from zero3d.checkpoint.slices import Copy
from zero3d.checkpoint.storage import storage_of
from zero3d.checkpoint.write import NAMES
from zero3d.errors import DataError

BLOCK: Final = 1 << 20
"""Bytes that are read at a time."""
DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Job:
    """`copy` from a piece, whose first element is byte `offset` of file number `file`, into the flat tensor `out`, of
    which nothing is used when the bytes turn out to be damaged."""

    file: int
    offset: int
    dtype: torch.dtype
    copy: Copy
    out: Tensor


def carry_out(jobs: Iterable[Job], folder: Place, manifest: Manifest) -> int:
    """Fills the tensors of all jobs. -> bytes read, checksums counted. DataError: a file is not what was written."""
    total = 0
    by_file: dict[int, list[Job]] = {}
    for job in jobs:
        by_file.setdefault(job.file, []).append(job)
    buffer = bytearray(BLOCK + 3 * CHUNK)
    for number, own in sorted(by_file.items()):
        with Reader(folder, manifest.files[number], buffer) as reader:
            own.sort(key=lambda job: job.offset + job.copy.source * job.dtype.itemsize)
            reader.expect(extent for job in own for extent in _extents(job))
            for job in own:
                _fill(job, reader)
            total += reader.bytes_read
    return total


class Reader:
    """One file. `buffer`: at least `BLOCK` bytes and 2 chunks, which several readers may use in turn."""

    def __init__(self, folder: Place, file: File, buffer: bytearray) -> None:
        self.path = folder / file.name
        self._folder = folder
        self.bytes_read = 0
        self._file = file
        self._buffer = memoryview(buffer)
        self._last = -1
        self._kept = b""
        self.expect(())

    def __enter__(self) -> Self:
        check_size(self.path, self._file.size)
        try:
            self._ranges = storage_of(self._folder).open(self._file.name)
        except OSError as error:
            raise self._wrong(f"cannot be read: {error.strerror or error}") from error
        try:
            self._table = self._read_table()
        except BaseException:
            self._ranges.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ranges.close()

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """What will be read, (start, stop) in rising order: it may be brought ahead of its time."""
        self._ahead = Ahead(ranges, lambda start, length: self._ranges.expect(start, length))

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) before the table, until the next call. At most `BLOCK` of them."""
        first, end = start // CHUNK, min(-(-stop // CHUNK) * CHUNK, self._file.table)
        base = first * CHUNK
        fresh = base
        if first == self._last:  # What came before ended in the same chunk.
            self._buffer[: len(self._kept)] = self._kept
            fresh += len(self._kept)
        if fresh < end:
            data = self._buffer[fresh - base : end - base]
            self._take(data, fresh)
            self._check(fresh, data)
        self._last = (end - 1) // CHUNK
        self._kept = bytes(self._buffer[self._last * CHUNK - base : end - base])
        return self._buffer[start - base : stop - base]

    def read_to(self, start: int, data: memoryview) -> None:
        """Fills `data` with bytes from `start` on, however many."""
        stop, at = start + len(data), start
        first, last = -(-start // CHUNK) * CHUNK, stop // CHUNK * CHUNK
        if first > start:
            at = min(first, stop)
            data[: at - start] = self.read(start, at)
        for begin in range(at, last, BLOCK):
            at = min(begin + BLOCK, last)
            part = data[begin - start : at - start]
            self._take(part, begin)
            self._check(begin, part)
        if at < stop:
            data[at - start :] = self.read(at, stop)

    def _check(self, start: int, data: memoryview) -> None:
        wrong = first_wrong(self._table, start // CHUNK, data)
        if wrong is not None:
            raise self._wrong(f"bytes {wrong * CHUNK} to {wrong * CHUNK + CHUNK} are not what was written")

    def _read_table(self) -> Sequence[int]:
        raw = bytearray(self._file.size - self._file.table)
        self._take(memoryview(raw), self._file.table)
        if zlib.crc32(raw) != self._file.checksum or len(raw) != -(-self._file.table // CHUNK) * ENTRY:
            raise self._wrong("its checksums are not what was written")
        table = array("I")
        assert table.itemsize == ENTRY
        table.frombytes(bytes(raw))
        if sys.byteorder == "big":
            table.byteswap()
        return table

    def _take(self, data: memoryview, offset: int) -> None:
        at = 0
        self._ahead.reading(offset)
        while at < len(data):
            try:
                number = self._ranges.read_into(data[at:], offset + at)
            except OSError as error:
                raise self._wrong(f"cannot be read: {error.strerror or error}") from error
            if not number:
                raise self._wrong(f"it ends at byte {offset + at}, of {self._file.size}")
            at += number
        self.bytes_read += at

    def _wrong(self, what: str) -> DataError:
        return DataError(what, where=str(self.path), hint=OTHER)


def _extents(job: Job) -> Iterator[tuple[int, int]]:
    """Bytes of its file that `job` reads, row by row."""
    copy, width = job.copy, job.dtype.itemsize
    for row in range(copy.rows):
        start = job.offset + (copy.source + row * copy.source_step) * width
        yield start, start + copy.length * width


def _fill(job: Job, reader: Reader) -> None:
    """Neighbouring rows at once where what lies between them would be read anyway; a long row block by block."""
    copy, width = job.copy, job.dtype.itemsize
    if copy.rows == 1 and job.out.dtype == job.dtype and job.out.device.type == "cpu":
        into = job.out[copy.target : copy.target + copy.length]
        reader.read_to(job.offset + copy.source * width, into.view(torch.uint8).numpy().data)
        return
    step, most = copy.source_step, BLOCK // width
    together = max(1, most // step) if step and (step - copy.length) * width < CHUNK else 1
    for row in range(0, copy.rows, together):
        rows = min(together, copy.rows - row)
        extent = (rows - 1) * step + copy.length
        for begin in range(0, extent, most):
            length = min(extent - begin, most)
            start = job.offset + (copy.source + row * step + begin) * width
            values = torch.frombuffer(reader.read(start, start + length * width), dtype=job.dtype)
            at = copy.target + row * copy.target_step + begin
            if rows > 1:
                into = job.out[at:].as_strided((rows, copy.length), (copy.target_step, 1))
                into.copy_(values.as_strided((rows, copy.length), (step, 1)))
            else:
                job.out[at : at + length].copy_(values)
