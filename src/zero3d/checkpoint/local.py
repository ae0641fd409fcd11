"""Checkpoints on a disk: written under a temporary name, synced, and made whole by one rename."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from zero3d.checkpoint.manifest import MANIFEST, OTHER
from zero3d.checkpoint.place import TEMPORARY, Draft, temporary
from zero3d.errors import DataError

BUFFER: Final = 1 << 22
"""Bytes that are written at a time."""


class Local:
    """A folder that the system's own calls reach. See `storage.Storage`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folders(self) -> list[str]:
        return [one.name for one in os.scandir(self._folder) if one.is_dir()]

    def has(self, name: str) -> bool:
        return (self._folder / name).is_file()

    def size(self, name: str) -> int:
        path = self._folder / name
        _refuse_link(path)
        return path.stat().st_size

    def read(self, name: str) -> bytes:
        path = self._folder / name
        _refuse_link(path)
        return path.read_bytes()

    def open(self, name: str) -> "LocalRanges":
        return LocalRanges(self._folder / name)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        with open(self._folder / name, "xb", buffering=BUFFER) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        sync(self._folder)

    def draft(self, name: str, token: str) -> Draft:
        return Draft(name, temporary(self._folder / name, token=token), "")

    def clear(self, draft: Draft) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in list(leftovers(self._folder, self._written(draft))):
            shutil.rmtree(left, ignore_errors=True)

    def begin(self, draft: Draft) -> None:
        self._written(draft).mkdir()

    def publish(self, draft: Draft, manifest: str) -> None:
        folder = self._written(draft)
        with Local(folder).create(MANIFEST) as file:
            file.write(manifest.encode())
        publish(folder, self._folder / draft.name)

    def discard(self, draft: Draft) -> None:
        shutil.rmtree(self._written(draft), ignore_errors=True)

    def remove(self, name: str) -> None:
        away = temporary(self._folder / name.partition(".")[0])
        (self._folder / name).rename(away)
        shutil.rmtree(away)

    def _written(self, draft: Draft) -> Path:
        return self._folder / draft.folder.name


class LocalRanges:
    """A file that is read by its descriptor."""

    def __init__(self, path: Path) -> None:
        # A link could have taken its place since its size was looked at; it would lead out of the folder.
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))

    def read_into(self, data: memoryview, offset: int) -> int:
        return os.preadv(self._descriptor, [data], offset)

    def expect(self, offset: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):  # Advice only: other systems read when they are asked to.
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        os.close(self._descriptor)


def leftovers(folder: Path, but: Path) -> Iterator[Path]:
    """What killed runs left: temporary folders but that which is being written, and what was replaced."""
    for one in os.scandir(folder):
        match = TEMPORARY.fullmatch(one.name)
        if match is None or not one.is_dir(follow_symlinks=False) or folder / one.name == but:
            continue
        if match[2] == "tmp" or (folder / match[1] / MANIFEST).is_file():
            yield folder / one.name


def publish(temporary_path: Path, path: Path) -> None:
    """One rename makes it whole. One of the same step gives way, and is gone only afterwards."""
    old = None
    if path.exists():
        old = temporary(path, "old")
        path.rename(old)
    temporary_path.rename(path)
    sync(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """What was made or renamed in the folder stays after a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_link(path: Path) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise DataError("it is no file of its own, but a link or a folder", where=str(path), hint=OTHER)
