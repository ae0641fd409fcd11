"""Where text comes from: a source becomes named documents of UTF-8 text.

A source is "python-stdlib" (the source files of the running Python), a text file, or a folder of text files.
Listing (names, sizes, times) comes first and reads no contents, so that work already done can be recognised;
reading goes file by file, in the order of relative paths, so that a source of any size takes little memory.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from zero3d.errors import DataError

STDLIB = "python-stdlib"
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})
_WHERE = "data.source"
_KINDS = f'"{STDLIB}", a text file, a folder of text files, or a prepared token file'


class Document(NamedTuple):
    """One text: its path below the source, and its UTF-8 bytes, never empty."""

    name: str
    content: bytes


class SourceFile(NamedTuple):
    """A file as it was listed: `size` in bytes, `modified` in ns."""

    name: str
    path: Path
    size: int
    modified: int


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a source consists of, by name; contents are not read yet."""

    source: str
    root: Path
    files: tuple[SourceFile, ...]

    @property
    def size(self) -> int:
        """Bytes in all files together."""
        return sum(file.size for file in self.files)


def list_files(source: str) -> Listing:
    """The files of a source, in the order in which they are read.

    Hidden files and folders (".git") are no part of a folder, nor installed packages of the standard library.
    DataError: the source is missing, is not a file or folder, cannot be listed, or holds no file.
    """
    root = Path(sysconfig.get_path("stdlib")) if source == STDLIB else Path(source).expanduser()
    if root.is_dir():
        paths = sorted(_walk(root, only_python=source == STDLIB), key=lambda path: path.relative_to(root).as_posix())
    elif root.is_file():
        paths = [root]
    elif root.exists():
        raise DataError(f"{source} is neither a file nor a folder", where=_WHERE, hint=f"Give {_KINDS}.")
    else:
        raise DataError(f"{source} does not exist", where=_WHERE, hint=f"Give {_KINDS}.")
    try:
        files = tuple(_listed(path, root) for path in paths)
    except OSError as error:
        _unreadable(error, source)
    if not files:
        raise DataError(f"{source} holds no text file", where=_WHERE, hint=f"Give {_KINDS}.")
    return Listing(source=source, root=root, files=files)


def documents(source: str, on_skip: Callable[[str], None] | None = None) -> Iterator[Document]:
    """The documents of a source; see `read`."""
    return read(list_files(source), on_skip)


def read(listing: Listing, on_skip: Callable[[str], None] | None = None) -> Iterator[Document]:
    """Documents in the order of the listing.

    Files of a folder that are not UTF-8 text are left out and named to `on_skip`; empty files are left out.
    DataError: a file cannot be read; the only file is empty or not text; no file of a folder is text.
    """
    alone = listing.files[0].path == listing.root
    found = skipped = 0
    for file in listing.files:
        try:
            content = file.path.read_bytes()
        except OSError as error:
            _unreadable(error, listing.source)
        if not content:
            continue
        if not is_text(content):
            skipped += 1
            if on_skip is not None:
                on_skip(file.name)
            continue
        found += 1
        yield Document(file.name, content)
    if found:
        return
    if alone:
        what = "is not UTF-8 text" if skipped else "is empty"
        hint = f"Convert it to UTF-8, or give {_KINDS}." if skipped else "Give a file with text in it."
        raise DataError(f"{listing.source} {what}", where=_WHERE, hint=hint)
    raise DataError(
        f"{listing.source} holds no text: of its {len(listing.files)} files {skipped} are not UTF-8 text, "
        f"the others empty",
        where=_WHERE,
        hint="Give a folder with UTF-8 text files in it.",
    )


def is_text(content: bytes) -> bool:
    """UTF-8 without zero bytes."""
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _walk(root: Path, *, only_python: bool) -> Iterator[Path]:
    def stop(error: OSError) -> NoReturn:
        _unreadable(error, str(root))

    for folder, folders, names in os.walk(root, onerror=stop):
        if only_python:
            folders[:] = [name for name in folders if name not in _NOT_STDLIB]
            names = [name for name in names if name.endswith(".py")]
        else:
            folders[:] = [name for name in folders if not name.startswith(".")]
            names = [name for name in names if not name.startswith(".")]
        # A pipe or socket among the files would block the reader.
        yield from (path for name in names if (path := Path(folder, name)).is_file())


def _listed(path: Path, root: Path) -> SourceFile:
    facts = path.stat()
    name = path.name if path == root else path.relative_to(root).as_posix()
    return SourceFile(name=name, path=path, size=facts.st_size, modified=facts.st_mtime_ns)


def _unreadable(error: OSError, source: str) -> NoReturn:
    what = f"{error.filename or source} cannot be read: {error.strerror or error}"
    raise DataError(what, where=_WHERE, hint="Check that it still exists and that you may read it.") from error
