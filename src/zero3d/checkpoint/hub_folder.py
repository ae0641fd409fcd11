"""Filling a hub folder, tensor after tensor: all of it is there in the end, or nothing is left of it."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Literal, Self

import torch
from torch import Tensor

from zero3d.checkpoint import torch_file
from zero3d.checkpoint.hub import CONFIG, INDEX, SHARD_BYTES, HubFile, Weight, in_files, index, with_dtype
from zero3d.checkpoint.local import sync
from zero3d.checkpoint.target import PARTIAL, check_free
from zero3d.checkpoint.write import BLOCK
from zero3d.errors import DISK_FULL, OutOfSpaceError, UsageError

Format = Literal["safetensors", "torch"]
ROOM: Final = 1 << 20
"""Bytes that must be free besides what the weights take."""


class HubFolder:
    """`add` takes the tensors of `weights` in the order of `order`. config: for config.json; None: there is none.

    UsageError: the folder has something in it, or cannot be written. OutOfSpaceError: there is no room for it.
    """

    def __init__(
        self,
        folder: Path,
        weights: Sequence[Weight],
        *,
        form: Format = "safetensors",
        shard_bytes: int = SHARD_BYTES,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.files = in_files(weights, shard_bytes if form == "safetensors" else _all_bytes(weights))
        self._form = form
        self._config = None if config is None else with_dtype(config, weights)
        self._left = iter([(file, one) for file in self.files for one in file.weights])
        self._at: HubFile | None = None
        self._out: BinaryIO | None = None
        self._made = False

    @property
    def order(self) -> list[Weight]:
        return [one for file in self.files for one in file.weights]

    @property
    def paths(self) -> list[Path]:
        """All files that there are in the end."""
        names = [torch_file.NAME] if self._form == "torch" else [file.name for file in self.files]
        names += [INDEX] if len(self.files) > 1 else []
        return [self.folder / name for name in (*names, *([] if self._config is None else [CONFIG]))]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def __enter__(self) -> Self:
        with self._explained():
            check_free(self.folder)
            self._made = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(self.folder).free, self.nbytes * (2 if self._form == "torch" else 1)
        if free < needed + ROOM:
            self._clean()
            raise OutOfSpaceError(
                f"the weights take {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free",
                where=str(self.folder),
                hint="Free some space there, or name another folder.",
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._out is not None:
            self._out.close()
        if kind is not None:
            self._clean()

    def add(self, tensor: Tensor) -> None:
        """Writes the next weight: its elements, on the CPU, in any dtype."""
        file, weight = next(self._left)
        assert tensor.numel() == weight.numel, weight.name
        flat = tensor.reshape(-1)
        with self._explained():
            out = self._opened(file)
            step = BLOCK // weight.dtype.itemsize
            for first in range(0, flat.numel(), step):
                out.write(flat[first : first + step].to(weight.dtype).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """All weights are written: the files get their names."""
        with self._explained():
            for file in self.files:  # One without any weight has had no `add`.
                if not file.weights:
                    self._opened(file)
            assert next(self._left, None) is None, "not all weights were added"
            self._close()
            if self._form == "torch":
                torch_file.save(self._partial(self.files[0]), self.files[0])
            else:
                for file in self.files:
                    os.rename(self._partial(file), self.folder / file.name)
                if len(self.files) > 1:
                    (self.folder / INDEX).write_text(index(self.files), encoding="utf-8")
            if self._config is not None:
                text = json.dumps(self._config, indent=2, sort_keys=True) + "\n"
                (self.folder / CONFIG).write_text(text, encoding="utf-8")
            sync(self.folder)

    def _opened(self, file: HubFile) -> BinaryIO:
        if self._out is None or self._at is not file:
            self._close()
            self._at, self._out = file, open(self._partial(file), "xb", buffering=0)  # noqa: SIM115
            self._out.write(file.header)
        return self._out

    def _close(self) -> None:
        if self._out is not None:
            os.fsync(self._out.fileno())
            self._out.close()
            self._out = None

    def _partial(self, file: HubFile) -> Path:
        return self.folder / (file.name + PARTIAL)

    def _clean(self) -> None:
        for path in (*self.paths, *map(self._partial, self.files)):
            with suppress(OSError):
                path.unlink()
        if self._made:
            with suppress(OSError):
                self.folder.rmdir()

    def _explained(self) -> AbstractContextManager[None]:
        return _explained(self.folder, self.nbytes)


@contextmanager
def _explained(folder: Path, nbytes: int) -> Iterator[None]:
    """What the system refuses, as one of our errors."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise OutOfSpaceError(
                f"{os.strerror(error.errno)}: {nbytes / 1e6:.1f} MB were to be written",
                where=str(folder),
                hint="Free some space there, or name another folder.",
            ) from error
        raise UsageError(
            f"it cannot be written: {error.strerror or error}", where=str(folder), hint="Name a folder of yours."
        ) from error


def _all_bytes(weights: Sequence[Weight]) -> int:
    return sum(one.nbytes for one in weights)


def groups(order: Sequence[Weight], nbytes: int) -> Iterator[list[Weight]]:
    """Weights that follow each other, together at least `nbytes` but for the last ones."""
    found: list[Weight] = []
    total = 0
    for one in order:
        found.append(one)
        total += one.nbytes
        if total >= nbytes:
            yield found
            found, total = [], 0
    if found:
        yield found
