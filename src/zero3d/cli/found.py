"""Which checkpoint a path of the user's means.

OUT                                a run's folder: the newest whole one below it
OUT/checkpoints                    the same
OUT/checkpoints/step-00001000      this one
"""

from pathlib import Path

from zero3d.checkpoint.folders import NAME, Found, candidates, is_checkpoint, newest, whole
from zero3d.checkpoint.manifest import Manifest
from zero3d.errors import DataError
from zero3d.records import CHECKPOINTS


def find(place: Path) -> Found:
    """The checkpoint that is meant. DataError: there is none, or none that is whole."""
    return newest(_folder(place))


def look(place: Path) -> tuple[Path, Manifest | None, tuple[str, ...]]:
    """The same where nothing is whole: the newest without its manifest, and why. DataError: there is none at all."""
    folder = _folder(place)
    found = candidates(folder)
    if not found or not found[0].is_dir():
        return _found(newest(folder))  # Which says so.
    problems: list[str] = []
    for path in found:
        try:
            return path, whole(path)[1], tuple(problems)
        except DataError as error:
            problems.append(f"{path.name}: {error.message} ({error.where})")
    return found[0], None, tuple(problems)


def step_of(path: Path) -> int | None:
    """What a checkpoint's name says."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _folder(place: Path) -> Path:
    below = place / CHECKPOINTS
    return below if not is_checkpoint(place) and below.is_dir() else place


def _found(one: Found) -> tuple[Path, Manifest | None, tuple[str, ...]]:
    return one.path, one.manifest, one.skipped
