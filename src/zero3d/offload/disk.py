"""The disk as a home: a rank's tensors in files of a folder that the user names.

The files are mapped, so the kernel reads ahead and writes behind, and takes back at any time the memory in which it
caches them. Several tensors share a file, as each file costs two of the process' descriptors.

Room is taken for good when a tensor is made: a mapping that found the disk full at a later write would end the process
(SIGBUS). A file system that copies on write (btrfs, ZFS) promises no such room, so a disk that others fill while the
run goes on can still do that there.
"""

import ctypes
import errno
import mmap
import os
import re
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from zero3d.errors import DISK_FULL, OutOfSpaceError, UsageError, Zero3dError

PAGE = mmap.PAGESIZE
"""Tensors begin at multiples of it, in bytes: what one lets go is never a neighbour's."""
FILE = 1 << 30
"""Bytes for which a file has room; a larger tensor has one of its own. Until they are given out they take no space."""
LEAST = 1 << 24
"""The same for files beyond what was said to be needed."""
WINDOW = 1 << 17
"""Bytes asked for at a time: Linux cuts a longer request to what one transfer of the disk holds."""

_NAME = re.compile(r"state-\d{5,}")
_LOCK = "lock"

_MORE_ROOM = "Free some space there, set offload.folder to a larger disk, or use more ranks."
_LIMITS = (errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_LACKING = (errno.ENODEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_UNFIT = (
    *_LACKING,
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    errno.ENAMETOOLONG,
)


@dataclass(frozen=True, eq=False)
class _File:
    name: str
    descriptor: int
    mapping: mmap.mmap


class StateFiles:
    """Tensors of one rank in `folder`/rank-00000: gone when it is closed, dropped, or when the process ends normally.

    What a run that was killed left there is removed, and nothing else: what this class did not put there stays, and
    links are not followed. `needed`: the bytes that tensors will take, checked against what is free before anything is
    written (each tensor takes up to a page more).

    UsageError: not a folder, not writable, or in use by another run that is alive. OutOfSpaceError: fewer bytes free
    than needed.
    """

    def __init__(self, folder: Path, rank: int, needed: int) -> None:
        self.path = folder.absolute() / f"rank-{rank:05d}"
        self.nbytes = 0
        """Of all tensors together."""
        self._needed = needed
        self._files: list[_File] = []
        self._end = 0
        self._places: dict[int, tuple[_File, int]] = {}
        with _as_errors(self.path):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._folder, lock = _owned(self.path)
            except FileExistsError as error:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
            self._close = weakref.finalize(self, _give_up, os.getpid(), self.path, self._folder, lock, self._files)
            try:
                for name in os.listdir(self._folder):
                    if _NAME.fullmatch(name):
                        os.unlink(name, dir_fd=self._folder)
                _check_room(self.path, self._folder, needed)
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            except BaseException:
                self.close()
                raise

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros [numel] on disk; `name` is for errors. OutOfSpaceError: the disk is full or the process at a limit."""
        assert self._close.alive, "closed"
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        with _as_errors(self.path, name):
            file, offset = self._taken(_pages(nbytes))
        out = torch.frombuffer(file.mapping, dtype=dtype, count=numel, offset=offset)
        self._places[out.untyped_storage().data_ptr()] = file, offset
        self.nbytes += nbytes
        return out

    def adopt(self, name: str, value: Tensor) -> Tensor:
        """The elements of `value` on disk, in its shape. Errors as of `tensor`."""
        return self.tensor(name, value.numel(), value.dtype).view(value.shape).copy_(value.detach())

    def ahead(self, tensors: Iterable[Tensor]) -> None:
        """They are wanted soon: the kernel begins to read what it does not have. Tensors, or views of them; those
        that live elsewhere are left alone, here and in `behind`."""
        for file, start, stop in self._spans(tensors):
            if not hasattr(os, "posix_fadvise"):
                file.mapping.madvise(mmap.MADV_WILLNEED, start, stop - start)
                continue
            # The same as madvise, but other threads run meanwhile.
            for begin in range(start, stop, WINDOW):
                os.posix_fadvise(file.descriptor, begin, min(WINDOW, stop - begin), os.POSIX_FADV_WILLNEED)

    def behind(self, tensors: Iterable[Tensor]) -> None:
        """They are done with for now: what changed begins to be written, and they leave this process' memory.

        Waits for a write of the same elements that began at an earlier call. Zero3dError or OutOfSpaceError: a write
        since then has failed, and what the file holds is no longer what was put there.
        """
        for file, start, stop in self._spans(tensors):
            with _as_errors(self.path):
                file.mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
                _begin_writing(file.descriptor, start, stop - start)

    def close(self) -> None:
        """Removes the files. Tensors that are still in use keep what they hold, and its space, until dropped."""
        self._places.clear()
        self._close()

    def _taken(self, size: int) -> tuple[_File, int]:
        """The file and the offset at which `size` bytes, whole pages, are now allocated."""
        if not self._files or self._end + size > len(self._files[-1].mapping):
            room = max(size, min(FILE, _pages(max(LEAST, self._needed - self.nbytes))))
            self._files.append(_new_file(self._folder, f"state-{len(self._files):05d}", room))
            self._end = 0
        file, offset = self._files[-1], self._end
        _allocate(file.descriptor, offset, size)
        self._end += size
        return file, offset

    def _spans(self, tensors: Iterable[Tensor]) -> Iterator[tuple[_File, int, int]]:
        """File, start and stop in bytes, of the whole pages in which each tensor lies."""
        for tensor in tensors:
            place = self._places.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if place is not None:
                file, offset = place
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
                start = offset + int(tensor.storage_offset()) * tensor.itemsize
                stop = start + (last + 1) * tensor.itemsize
                yield file, start - start % PAGE, _pages(stop)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _owned(path: Path) -> tuple[int, int]:
    """Descriptors of the folder, made where it is missing, and of its lock, held."""
    while True:  # until what the last owner removes is not what is opened here
        path.mkdir(mode=0o700, exist_ok=True)
        with ExitStack() as opened, suppress(FileNotFoundError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, folder)
            lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            opened.callback(os.close, lock)
            _hold(lock, path)
            if os.path.samestat(os.fstat(lock), os.stat(_LOCK, dir_fd=folder, follow_symlinks=False)):
                opened.pop_all()
                return folder, lock


def _hold(lock: int, path: Path) -> None:
    import fcntl  # here, as not every system has it

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(lock, 200, 0).decode(errors="replace") or "unknown"
        raise UsageError(
            f"in use by another run that is alive ({owner})",
            where=str(path),
            hint="Let it end, or set offload.folder to another folder: each run needs one of its own.",
        ) from error


def _check_room(path: Path, folder: int, needed: int) -> None:
    stats = os.fstatvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    # Some file systems over a network do not know their size.
    if stats.f_blocks and free < needed:
        raise OutOfSpaceError(
            f"optimizer state needs {needed:,} bytes on disk, and {free:,} are free",
            where=str(path),
            hint=_MORE_ROOM,
        )


def _new_file(folder: int, name: str, room: int) -> _File:
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        os.ftruncate(descriptor, room)
        return _File(name, descriptor, mmap.mmap(descriptor, room, flags=mmap.MAP_SHARED))
    except BaseException:
        os.close(descriptor)
        os.unlink(name, dir_fd=folder)
        raise


def _allocate(descriptor: int, offset: int, size: int) -> None:
    """Takes the room on the disk; reads as zeros."""
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(descriptor, offset, size)
        except OSError as error:
            if error.errno not in _LACKING:
                raise
    zeros = memoryview(bytes(min(size, 1 << 20)))
    stop = offset + size
    while offset < stop:
        offset += os.pwrite(descriptor, zeros[: stop - offset], offset)
    # Over a network it is only now that a full disk is noticed.
    os.fsync(descriptor)
    return None


def _begin_writing(descriptor: int, offset: int, size: int) -> None:
    """Begins to write what changed. OSError: an earlier write to the file failed."""
    sync_file_range = _sync_file_range()
    if sync_file_range is not None:
        # The first flag waits for what began earlier, which is how its failure gets known.
        wait_before, write = 1, 2
        if sync_file_range(descriptor, offset, size, wait_before | write) == 0:
            return
        number = ctypes.get_errno()
        if number not in _LACKING:
            raise OSError(number, os.strerror(number))
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's call, which Python does not offer."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def _give_up(owner: int, path: Path, folder: int, lock: int, files: list[_File]) -> None:
    """Ends what StateFiles holds; a process forked off it leaves its files alone."""
    if os.getpid() == owner:
        # What cannot be removed now is removed by the next run in the folder.
        with suppress(OSError):
            for name in (*(file.name for file in files), _LOCK):
                os.unlink(name, dir_fd=folder)
            path.rmdir()
    for descriptor in (folder, lock, *(file.descriptor for file in files)):
        os.close(descriptor)
    files.clear()


@contextmanager
def _as_errors(path: Path, name: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"optimizer state{f' of {name}' if name else ''} cannot be kept on disk: {error.strerror or error}"
        if error.errno in DISK_FULL:
            raise OutOfSpaceError(what, where=str(path), hint=_MORE_ROOM) from error
        if error.errno in _LIMITS:
            hint = "Raise the limits of the process (ulimit -a shows them), or use more ranks."
            raise OutOfSpaceError(what, where=str(path), hint=hint) from error
        if error.errno in _UNFIT:
            hint = "Set offload.folder to a folder on a local disk that you may write to."
            raise UsageError(what, where=str(path), hint=hint) from error
        hint = "See the system's log for what failed; set offload.folder to another disk. Checkpoints are as they were."
        raise Zero3dError(what, where=str(path), hint=hint) from error
