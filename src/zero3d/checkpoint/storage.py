"""How checkpoints are stored: what saving and loading ask of a folder, be it on a disk or at a URL.

A folder is either a run's, with checkpoints in it, or a checkpoint's, with files. Names are those of what is in it.
Errors are OSErrors, which say what is not there, or errors of ours, which name the place.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from zero3d.checkpoint.local import Local
from zero3d.checkpoint.place import Draft, Place, Url


class Out(Protocol):
    """A file that is being written, from its beginning to its end."""

    def write(self, data: bytes | memoryview, /) -> object: ...


class Ranges(Protocol):
    """A file that is read here and there."""

    def read_into(self, data: memoryview, offset: int) -> int:
        """Fills the beginning of `data` with what begins at byte `offset`. -> how much; 0: the file ends there."""
        ...

    def expect(self, offset: int, length: int) -> None:
        """These bytes will be read soon."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """One folder."""

    def folders(self) -> list[str]:
        """Names of the folders in it. FileNotFoundError: it is not there itself."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        ...

    def size(self, name: str) -> int:
        """Of a file, in bytes. DataError: it is no file of its own."""
        ...

    def read(self, name: str) -> bytes:
        """A small file. DataError: it is no file of its own."""
        ...

    def open(self, name: str) -> Ranges: ...

    def create(self, name: str) -> AbstractContextManager[Out]:
        """A new file. When the context ends well the file is there to stay."""
        ...

    def draft(self, name: str, token: str) -> Draft:
        """Of a checkpoint called `name`; the same on every rank, of the same `token`, which no other save has."""
        ...

    def clear(self, draft: Draft) -> None:
        """Removes what killed runs left, but nothing of `draft`; makes the folder."""
        ...

    def begin(self, draft: Draft) -> None:
        """Makes the folder that files are written to."""
        ...

    def publish(self, draft: Draft, manifest: str) -> None:
        """All other files are there: makes it whole at once. One of the same name gives way, and not before."""
        ...

    def discard(self, draft: Draft) -> None:
        """Removes what is there of it. An error of this is none."""
        ...

    def remove(self, name: str) -> None:
        """A checkpoint: at no time is it half there under its name."""
        ...


def storage_of(folder: Place) -> Storage:
    """UsageError: the remote cannot be reached by what is installed."""
    if isinstance(folder, Url):
        from zero3d.checkpoint.remote import Remote

        return Remote(folder)
    assert isinstance(folder, Path)
    return Local(folder)
