"""Where checkpoints are, a `Path` or a `Url`, and what they are called there. Pure.

step-00001000/               whole: on a disk since it came by one rename, at a URL since its manifest is there
step-00001000.tmp-5f2c/      on a disk: being written, or what a killed run left
step-00001000.old-77aa/      on a disk: replaced by another of the same step; whole too until it is gone
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Final, Protocol, Self
from urllib.parse import unquote

from zero3d.errors import UsageError

NAME: Final = re.compile(r"step-(\d{8,18})(\.old-[0-9a-f]+)?")
TEMPORARY: Final = re.compile(r"(step-\d{8,18})\.(tmp|old)-[0-9a-f]+")
URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
FILE: Final = "file://"


class Place(Protocol):
    """What a `Path` and a `Url` have in common."""

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> Self: ...

    def with_name(self, name: str, /) -> Self: ...

    def __truediv__(self, name: str, /) -> Self: ...


@dataclass(frozen=True)
class Url:
    """A folder or a file of a remote: `text` has no slash at its end, unless it is all of the remote."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        return Url(self.text.rpartition("/")[0])

    def with_name(self, name: str) -> "Url":
        return self.parent / name

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self.text}{'' if self.text.endswith('://') else '/'}{name}")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written. name: what it will be called; folder: where its files are written; mark: what
    their names end in, so that they are no other save's."""

    name: str
    folder: Path | Url
    mark: str


def place(folder: str | os.PathLike[str] | Url) -> Path | Url:
    """What the user's text or path means; file:// is a path. UsageError: it cannot be meant."""
    if not isinstance(folder, str | os.PathLike | Url) or not str(folder):
        raise UsageError(f"folder = {folder!r}", hint="Give a path, or a URL such as s3://bucket/run.")
    text = str(folder)
    if isinstance(folder, Url):
        return folder
    if "://" not in text:
        first = Path(text).parts[:1]
        if not isinstance(folder, str) and first and re.fullmatch(r"[A-Za-z0-9+.-]{2,}:", first[0]):
            raise UsageError(
                "a Path holds no URL: it makes one slash of two", where=text, hint="Give the URL as a text."
            )
        return Path(text)
    if URL.match(text) is None:
        raise UsageError(
            "this is no URL of a folder",
            where=text,
            hint="Give a path, or a URL such as s3://bucket/run; none that is "
            "chained with ::, as what is kept beside a checkpoint may be older than it.",
        )
    if text.startswith(FILE):
        path = Path(unquote(text.removeprefix(FILE)))
        if not path.is_absolute():
            raise UsageError("file:// is followed by a whole path", where=text, hint="Such as file:///data/run.")
        return path
    scheme, rest = text.split("://", 1)
    return Url(f"{scheme}://{rest.rstrip('/')}")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def temporary(path: Path, kind: str = "tmp", token: str = "") -> Path:
    """Another name beside `path`, which nobody has."""
    return path.with_name(f"{path.name}.{kind}-{token or token_hex(8)}")
