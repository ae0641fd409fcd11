"""The folder of a run's checkpoints: names, which of them are whole, which are kept. Pure.

step-00001000/               whole, since it came by one rename
step-00001000.tmp-5f2c/      being written, or what a killed run left
step-00001000.old-77aa/      replaced by another of the same step; whole too until it is gone
"""

import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Final

from zero3d.checkpoint.manifest import MANIFEST, OTHER, Manifest, parse
from zero3d.errors import DataError, UsageError

NAME: Final = re.compile(r"step-(\d{8,18})(\.old-[0-9a-f]+)?")
TEMPORARY: Final = re.compile(r"(step-\d{8,18})\.(tmp|old)-[0-9a-f]+")


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint; `skipped`: newer ones and why they cannot be used."""

    path: Path
    manifest: Manifest
    skipped: tuple[str, ...]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def temporary(path: Path, kind: str = "tmp") -> Path:
    """Another name beside `path`, which nobody has."""
    return path.with_name(f"{path.name}.{kind}-{token_hex(8)}")


def candidates(folder: Path) -> list[Path]:
    """What may be checkpoints, newest first: those in `folder`, or `folder` itself."""
    return [folder] if is_checkpoint(folder) else [path for _, path in _by_step(folder)]


def _by_step(folder: Path) -> list[tuple[int, Path]]:
    """Newest first; what was replaced comes after what took its place."""
    try:
        names = [match for one in os.scandir(folder) if one.is_dir() and (match := NAME.fullmatch(one.name))]
    except OSError as error:
        raise DataError(
            f"there are no checkpoints: {error.strerror or error}",
            where=str(folder),
            hint="Give the folder that checkpoints were saved in, or one of them.",
        ) from error
    ordered = sorted(names, key=lambda match: (-int(match[1]), match[2] or ""))
    return [(int(match[1]), folder / match[0]) for match in ordered]


def is_checkpoint(folder: Path) -> bool:
    return NAME.fullmatch(folder.name) is not None or (folder / MANIFEST).is_file()


def whole(path: Path) -> tuple[str, Manifest]:
    """Text and contents of the manifest at `path`, all of whose files are there in full size. DataError otherwise."""
    manifest_path = path / MANIFEST
    try:
        _refuse_link(manifest_path)
        text = manifest_path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError("the manifest is no text", where=str(manifest_path), hint=OTHER) from error
    except OSError as error:
        raise DataError(
            f"no manifest: {error.strerror or error}", where=str(manifest_path), hint="It was never finished. " + OTHER
        ) from error
    manifest = parse(text, manifest_path)
    for one in manifest.files:
        check_size(path / one.name, one.size)
    return text, manifest


def check_size(path: Path, size: int) -> None:
    """DataError: `path` is no file of its own, or not of `size` bytes."""
    try:
        _refuse_link(path)
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"a file is missing: {error.strerror or error}", where=str(path), hint=OTHER) from error
    if found != size:
        raise DataError(f"{found} bytes, where {size} were written", where=str(path), hint=OTHER)


def newest(folder: str | os.PathLike[str]) -> Found:
    """The newest whole checkpoint in `folder`, by its manifest and the sizes of its files. DataError: there is none."""
    skipped: list[str] = []
    for path in candidates(Path(folder)):
        try:
            return Found(path, whole(path)[1], tuple(skipped))
        except DataError as error:
            skipped.append(f"{path.name}: {error}".splitlines()[0])
    raise none_in(Path(folder), skipped)


def none_in(folder: Path, skipped: list[str]) -> DataError:
    """What to say where no checkpoint can be used."""
    why = "; ".join(skipped) or "there is none"
    return DataError(f"no whole checkpoint: {why}", where=str(folder), hint="Begin anew, or give another folder.")


def keep(folder: str | os.PathLike[str], *, last: int, every: int = 0) -> list[Path]:
    """Removes all whole checkpoints in `folder` but the `last` newest ones and those of steps that `every` divides (0:
    no others), newest first. -> those removed. What is not whole is no reason to remove another."""
    if last < 1:
        raise UsageError(f"keep(last={last}) would remove the newest checkpoint", hint="Keep 1 or more.")
    kept, removed = 0, []
    for step, path in _by_step(Path(folder)):
        try:
            whole(path)
        except DataError:
            continue
        kept += 1
        if kept > last and not (every and step % every == 0):
            remove(path)
            removed.append(path)
    return removed


def remove(path: Path) -> None:
    """At no time is it half there under its name."""
    away = temporary(path.with_name(path.name.partition(".")[0]))
    path.rename(away)
    shutil.rmtree(away)


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
