"""Whole tensors out of a checkpoint's pieces: no ranks, no model, one tensor in memory at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from zero3d.checkpoint.chunks import CHUNK
from zero3d.checkpoint.manifest import ITEMSIZE, Entry, Manifest
from zero3d.checkpoint.place import Url
from zero3d.checkpoint.read import BLOCK, DTYPES, Reader
from zero3d.checkpoint.slices import Span, copies, whole

OPEN: Final = 64
"""Files that are open at a time: a process may have only so many."""

Tell = Callable[[int, int], None]
"""Is told (bytes that are done, bytes in all) now and then."""


def put(values: Tensor, span: Span, shape: Sequence[int], out: Tensor) -> None:
    """`values`, flat, are elements `span` of a part: they go where they belong in `out`, the whole tensor, flat.
    Padding goes nowhere."""
    for copy in copies(span, Span(whole(shape), 0, out.numel())):
        size = copy.rows, copy.length
        into = out.as_strided(size, (copy.target_step, 1), copy.target)
        into.copy_(values[copy.source :].as_strided(size, (copy.source_step, 1)))


class Rebuilder:
    """Reads the checkpoint `manifest` in `folder`, file by file as tensors need them, and checks what it reads."""

    def __init__(self, folder: Path | Url, manifest: Manifest) -> None:
        self._folder = folder
        self._files = manifest.files
        self._buffer = bytearray(BLOCK + 3 * CHUNK)
        self._open: dict[int, Reader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._close_first()

    def tensor(self, entry: Entry, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, in its own dtype or another. DataError: a file is not what was written."""
        out = torch.empty(entry.numel, dtype=dtype or DTYPES[entry.dtype])
        width = ITEMSIZE[entry.dtype]
        step = BLOCK // width
        for piece, span in entry.spans():
            reader = self._reader(piece.file)
            for first in range(0, piece.numel, step):
                numel = min(step, piece.numel - first)
                start = piece.offset + first * width
                values = torch.frombuffer(reader.read(start, start + numel * width), dtype=DTYPES[entry.dtype])
                put(values, Span(span.part, span.begin + first, numel), entry.shape, out)
        return out.view(entry.shape)

    def verify(self, tell: Tell) -> None:
        """Reads every byte of every file. DataError: one is not what was written."""
        total, done = sum(one.size for one in self._files), 0
        for number, file in enumerate(self._files):
            reader = self._reader(number)
            for start in range(0, file.table, BLOCK):
                reader.read(start, min(start + BLOCK, file.table))
                tell(done + start, total)
            done += file.size
        tell(total, total)

    def _reader(self, number: int) -> Reader:
        found = self._open.get(number)
        if found is None:
            if len(self._open) >= OPEN:
                self._close_first()
            found = Reader(self._folder, self._files[number], self._buffer).__enter__()
            self._open[number] = found
        return found

    def _close_first(self) -> None:
        self._open.pop(next(iter(self._open))).__exit__(None, None, None)
