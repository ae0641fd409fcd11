"""Which checkpoint a path or a URL of the user's means.

OUT                                a run's folder: the newest whole one below it
OUT/checkpoints                    the same
OUT/checkpoints/step-00001000      this one
"""

from pathlib import Path

from zero3d.checkpoint.folders import NAME, Found, candidates, is_checkpoint, newest, whole
from zero3d.checkpoint.manifest import Manifest
from zero3d.checkpoint.place import Url
from zero3d.checkpoint.place import place as meant
from zero3d.checkpoint.storage import storage_of
from zero3d.errors import DataError
from zero3d.records import CHECKPOINTS


def find(place: str | Path | Url) -> Found:
    """The checkpoint that is meant. DataError: there is none, or none that is whole. UsageError: no such URL."""
    return newest(_folder(place))


def look(place: str | Path | Url) -> tuple[Path | Url, Manifest | None, tuple[str, ...]]:
    """The same where nothing is whole: the newest without its manifest, and why. DataError: there is none at all."""
    folder = _folder(place)
    found = candidates(folder)
    if not found or not _is_folder(found[0]):
        return _found(newest(folder))  # Which says so.
    problems: list[str] = []
    for path in found:
        try:
            return path, whole(path)[1], tuple(problems)
        except DataError as error:
            problems.append(f"{path.name}: {error.message} ({error.where})")
    return found[0], None, tuple(problems)


def step_of(path: Path | Url) -> int | None:
    """What a checkpoint's name says."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _folder(place: str | Path | Url) -> Path | Url:
    given = meant(place)
    below = given / CHECKPOINTS
    return below if not is_checkpoint(given) and _is_folder(below) else given


def _is_folder(place: Path | Url) -> bool:
    try:
        storage_of(place).folders()
    except OSError:
        return False
    return True


def _found(one: Found) -> tuple[Path | Url, Manifest | None, tuple[str, ...]]:
    return one.path, one.manifest, one.skipped
