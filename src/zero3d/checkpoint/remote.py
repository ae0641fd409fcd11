"""Checkpoints at a URL, through fsspec: nothing can be renamed there, so the manifest, written last, makes one whole.

step-00001000/rank-00000-5f2c.safetensors      names that no other save has
step-00001000/manifest.json                    names the files that count

One of the same step is whole until its manifest is written over, which object stores do at once; then its files go. A
folder without a manifest is no checkpoint: it is being written, or what a killed run left.
"""

import errno
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from zero3d.checkpoint.manifest import MANIFEST, OTHER
from zero3d.checkpoint.place import NAME, Draft, Url
from zero3d.errors import DISK_FULL, DataError, OutOfSpaceError, UsageError, Zero3dError

AHEAD: Final = 1 << 23
"""Bytes that are asked of the remote at a time, at least: each question takes its way there and back."""


class Remote:
    """A folder at a URL. See `storage.Storage`.

    What fsspec or the remote raises becomes `UsageError`, which names the URL, but for FileNotFoundError: only what is
    surely not there makes way for another checkpoint, or is cleared away.
    """

    def __init__(self, folder: Url) -> None:
        self._url = folder
        self._fs, self._path = _opened(folder)

    def folders(self) -> list[str]:
        return [_last(one["name"]) for one in self._listed() if one["type"] == "directory"]

    def has(self, name: str) -> bool:
        try:
            return bool(self._info(name)["type"] == "file")
        except FileNotFoundError:
            return False

    def size(self, name: str) -> int:
        found = self._info(name)
        if found["type"] != "file":
            raise DataError("it is no file", where=str(self._url / name), hint=OTHER)
        return int(found["size"])

    def read(self, name: str) -> bytes:
        with explained(self._url / name, "read"):
            return bytes(self._fs.cat_file(self._at(name)))

    def open(self, name: str) -> "RemoteRanges":
        with explained(self._url / name, "read"):
            return RemoteRanges(self._url / name, self._fs.open(self._at(name), "rb", block_size=AHEAD))

    @contextmanager
    def create(self, name: str) -> Iterator["RemoteOut"]:
        url = self._url / name
        with explained(url, "written"):
            file = self._fs.open(self._at(name), "wb")
        try:
            yield RemoteOut(url, file)
        except BaseException:
            with suppress(Exception):  # The first error is the one to tell.
                file.close()
            self._removed(self._at(name))
            raise
        with explained(url, "written"):
            file.close()

    def draft(self, name: str, token: str) -> Draft:
        return Draft(name, self._url / name, f"-{token}")

    def clear(self, draft: Draft) -> None:
        try:
            names = self.folders()
        except FileNotFoundError:
            return
        for name in names:
            below = Remote(self._url / name)
            if name != draft.name and NAME.fullmatch(name) and not below.has(MANIFEST):
                below._emptied()

    def begin(self, draft: Draft) -> None:
        path = self._at(draft.name)
        with explained(self._url, "written"):
            if self._may_have_folders(path.partition("/")[0]):
                self._fs.makedirs(path, exist_ok=True)

    def _may_have_folders(self, bucket: str) -> bool:
        """UsageError: there is no such bucket. Making the folder would make it, where one may make buckets."""
        try:
            if bucket:
                self._fs.info(bucket)
        except FileNotFoundError as error:
            raise UsageError(
                f"there is no {bucket}", where=str(self._url), hint="Make it first, or name another."
            ) from error
        except Exception:  # One may be allowed what is below, and nothing else; where keys are, folders need not be.
            return False
        return True

    def publish(self, draft: Draft, manifest: str) -> None:
        below = Remote(self._url / draft.name)
        with explained(below._url / MANIFEST, "written"):
            below._fs.pipe_file(below._at(MANIFEST), manifest.encode())
        below._emptied(lambda name: name != MANIFEST and draft.mark not in name)

    def discard(self, draft: Draft) -> None:
        below = Remote(self._url / draft.name)
        with suppress(Zero3dError, OSError):
            # The remote may have taken the manifest and told of an error: then it is whole, and stays.
            if not below.has(MANIFEST) or draft.mark not in below.read(MANIFEST).decode():
                below._emptied(lambda name: draft.mark in name)

    def remove(self, name: str) -> None:
        below = Remote(self._url / name)
        with explained(below._url, "removed"):
            with suppress(FileNotFoundError):
                below._fs.rm_file(below._at(MANIFEST))
            below._fs.rm(below._path, recursive=True)

    def _emptied(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Removes the files whose names are `wanted`, and the folder if nothing else is in it."""
        try:
            files = [_last(one["name"]) for one in self._listed()]
        except (Zero3dError, OSError):
            return
        for name in filter(wanted, files):
            self._removed(self._at(name))
        if all(map(wanted, files)):
            with suppress(Exception):  # Most remotes have no folders but in names.
                self._fs.rmdir(self._path)

    def _removed(self, path: str) -> None:
        """What is left of a file takes room, and is no harm: the next save tries again."""
        with suppress(Exception):
            self._fs.rm_file(path)

    def _listed(self) -> list[dict[str, Any]]:
        """Asked anew: fsspec keeps lists, and other ranks write."""
        with explained(self._url, "read"):
            self._fs.invalidate_cache()
            found: list[dict[str, Any]] = self._fs.ls(self._path, detail=True)
        return [one for one in found if _last(one["name"]) not in ("", _last(self._path))]

    def _info(self, name: str) -> dict[str, Any]:
        """Not fsspec's `exists`, to which what cannot be reached does not exist."""
        with explained(self._url / name, "read"):
            self._fs.invalidate_cache()
            found: dict[str, Any] = self._fs.info(self._at(name))
        return found

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}" if self._path else name


class RemoteOut:
    def __init__(self, url: Url, file: Any) -> None:
        self._url = url
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        with explained(self._url, "written"):
            self._file.write(data)


class RemoteRanges:
    """fsspec reads ahead, so that neighbouring ranges are asked for once."""

    def __init__(self, url: Url, file: Any) -> None:
        self._url = url
        self._file = file

    def read_into(self, data: memoryview, offset: int) -> int:
        with explained(self._url, "read"):
            self._file.seek(offset)
            found = self._file.read(len(data))
        data[: len(found)] = found
        return len(found)

    def expect(self, offset: int, length: int) -> None:
        """fsspec's files read ahead by themselves."""

    def close(self) -> None:
        with suppress(Exception):  # All that was wanted has been read.
            self._file.close()


@contextmanager
def explained(url: Url, done: str) -> Iterator[None]:
    """What the remote refuses, as one of our errors. done: what was to be done with it."""
    try:
        yield
    except (Zero3dError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(url)) from error
    except Exception as error:
        kind = OutOfSpaceError if isinstance(error, OSError) and error.errno in DISK_FULL else UsageError
        raise kind(
            f"it cannot be {done}: {type(error).__name__}: {error}",
            where=str(url),
            hint="See that all ranks may reach the URL, and write to it where they save; then try again.",
        ) from error


def _opened(url: Url) -> tuple[Any, str]:
    """fsspec's file system, and what it calls the folder."""
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise UsageError(
            "checkpoints at a URL need the package fsspec",
            where=str(url),
            hint='Install it with pip install "zero3d[remote]", or give the path of a folder.',
        ) from error
    try:
        fs, path = core.url_to_fs(str(url))
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"fsspec cannot open it: {error}",
            where=str(url),
            hint="Each kind of remote has its own package: s3fs for s3://, gcsfs for gs://, adlfs for az://.",
        ) from error
    except Exception as error:
        raise UsageError(
            f"it cannot be opened: {type(error).__name__}: {error}", where=str(url), hint="See fsspec's settings of it."
        ) from error
    return fs, str(path)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
