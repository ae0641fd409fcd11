"""The folder of a run's checkpoints: which of them are whole, which are kept. Pure."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from zero3d.checkpoint.manifest import MANIFEST, OTHER, Manifest, parse
from zero3d.checkpoint.place import NAME as NAME
from zero3d.checkpoint.place import Place, Url, place
from zero3d.checkpoint.place import name_of as name_of
from zero3d.checkpoint.storage import storage_of
from zero3d.errors import DataError, UsageError

Somewhere = TypeVar("Somewhere", bound=Place)


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint; `skipped`: newer ones and why they cannot be used."""

    path: Path | Url
    manifest: Manifest
    skipped: tuple[str, ...]


def candidates(folder: Somewhere) -> list[Somewhere]:
    """What may be checkpoints, newest first: those in `folder`, or `folder` itself."""
    if storage_of(folder).has(MANIFEST):
        return [folder]
    found = [path for _, path in _by_step(folder)]
    # A folder of checkpoints may have been given the name of one.
    return found or ([folder] if is_checkpoint(folder) else [])


def any_in(folder: Place) -> bool:
    """Whether there are any, whole or not."""
    try:
        return bool(candidates(folder))
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise


def _by_step(folder: Somewhere) -> list[tuple[int, Somewhere]]:
    """Newest first; what was replaced comes after what took its place."""
    try:
        names = [match for name in storage_of(folder).folders() if (match := NAME.fullmatch(name))]
    except OSError as error:
        raise DataError(
            f"there are no checkpoints: {error.strerror or error}",
            where=str(folder),
            hint="Give the folder that checkpoints were saved in, or one of them.",
        ) from error
    ordered = sorted(names, key=lambda match: (-int(match[1]), match[2] or ""))
    return [(int(match[1]), folder / match[0]) for match in ordered]


def is_checkpoint(folder: Place) -> bool:
    return NAME.fullmatch(folder.name) is not None or storage_of(folder).has(MANIFEST)


def whole(path: Place) -> tuple[str, Manifest]:
    """Text and contents of the manifest at `path`, all of whose files are there in full size. DataError otherwise."""
    manifest_path = path / MANIFEST
    try:
        text = storage_of(path).read(MANIFEST).decode()
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


def check_size(path: Place, size: int) -> None:
    """DataError: `path` is no file of its own, or not of `size` bytes."""
    try:
        found = storage_of(path.parent).size(path.name)
    except OSError as error:
        raise DataError(f"a file is missing: {error.strerror or error}", where=str(path), hint=OTHER) from error
    if found != size:
        raise DataError(f"{found} bytes, where {size} were written", where=str(path), hint=OTHER)


def newest(folder: str | os.PathLike[str] | Url) -> Found:
    """The newest whole checkpoint in `folder`, by its manifest and the sizes of its files. DataError: there is none."""
    skipped: list[str] = []
    for path in candidates(place(folder)):
        try:
            return Found(path, whole(path)[1], tuple(skipped))
        except DataError as error:
            skipped.append(f"{path.name}: {error}".splitlines()[0])
    raise none_in(place(folder), skipped)


def none_in(folder: Place, skipped: list[str]) -> DataError:
    """What to say where no checkpoint can be used."""
    if not skipped:
        hint = "Give one that holds some, or begin anew."
        return DataError("no checkpoint is in this folder", where=str(folder), hint=hint)
    why = "; ".join(skipped)
    return DataError(f"no whole checkpoint: {why}", where=str(folder), hint="Begin anew, or give another folder.")


def keep(folder: Somewhere, *, last: int, every: int = 0, newest: str | None = None) -> list[Somewhere]:
    """Removes all whole checkpoints in `folder` but the `last` newest ones and those of steps that `every` divides (0:
    no others), newest first. -> those removed. What is not whole is no reason to remove another, nor is what comes
    after `newest`, the name of one: a run that went on from before it could not use it."""
    if last < 1:
        raise UsageError(f"keep(last={last}) would remove the newest checkpoint", hint="Keep 1 or more.")
    kept, removed = 0, list[Somewhere]()
    for step, path in _by_step(folder):
        if newest is not None and path.name > newest:
            continue
        try:
            whole(path)
        except DataError:
            continue
        kept += 1
        if kept > last and not (every and step % every == 0):
            storage_of(folder).remove(path.name)
            removed.append(path)
    return removed
