"""Which folder is a run's, and which ones near it are. Pure."""

import difflib
from collections.abc import Iterator
from pathlib import Path

from zero3d.config_io import join
from zero3d.errors import UsageError
from zero3d.records import CONFIG, METRICS, PLAN

MOST_NAMED = 3
MOST_LOOKED_AT = 500
"""Folders; where there are more, no more are looked into for a hint."""


def is_run(folder: Path) -> bool:
    """Whether a run has begun to write there."""
    return (folder / METRICS).is_file() or ((folder / CONFIG).is_file() and (folder / PLAN).is_file())


def find(path: Path) -> Path:
    """`path`, which is a run's folder. UsageError: it is none; names those that are near."""
    try:
        if is_run(path):
            return path
        there = path.exists()
        near = _nearest(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}", hint="Give a folder that you may read."
        ) from None
    if not there:
        what = f"there is no {path}"
    elif not path.is_dir():
        what = f"{path} is a file, not the folder of a run"
    else:
        what = f"{path} is not the folder of a run: it has no {METRICS}"
    named = join((str(one) for one in near), "or") if near else ""
    hint = f"Did you mean {named}?" if named else "Give what a run's configuration calls run.out, such as runs/demo."
    raise UsageError(what, hint=hint)


def _nearest(path: Path) -> list[Path]:
    """Runs below, above and beside it, those first whose names are most alike."""
    below = list(_runs(path, depth=2)) if path.is_dir() else []
    above = [one for one in path.parents if str(one) != "." and is_run(one)][:1]
    beside = list(_runs(path.parent, depth=1)) or list(_runs(path.parent.parent, depth=2))
    if not below and not above and not beside:
        beside = list(_runs(Path("runs"), depth=1))
    alike = sorted(beside, key=lambda one: -difflib.SequenceMatcher(None, one.name, path.name).ratio())
    return list(dict.fromkeys([*above, *sorted(below), *alike]))[:MOST_NAMED]


def _runs(folder: Path, *, depth: int) -> Iterator[Path]:
    """At most `depth` folders down."""
    try:
        inside = sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    except OSError:
        return
    for one in inside[:MOST_LOOKED_AT]:
        try:
            found = is_run(one)
        except OSError:
            continue
        if found:
            yield one
        elif depth > 1:
            yield from _runs(one, depth=depth - 1)
