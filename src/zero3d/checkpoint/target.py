"""The folder that an export is to fill: it must be nobody's yet. Pure."""

import os
from pathlib import Path
from typing import Final

from zero3d.errors import UsageError

PARTIAL: Final = ".partial"
"""How the names of files end until all of them are written."""


def check_free(folder: Path) -> None:
    """UsageError: `folder` is no folder, or has something in it."""
    if folder.exists() and not folder.is_dir():
        raise UsageError("this is a file, and a folder is to be made", where=str(folder), hint="Name another.")
    there = sorted(one.name for one in os.scandir(folder)) if folder.exists() else []
    if there:
        half = " What ends in .partial is left of an export that was killed."
        raise UsageError(
            f"the folder is not empty: it has {there[0]}{f' and {len(there) - 1} more' if there[1:] else ''}",
            where=str(folder),
            hint="Name a new one; nothing is ever written over."
            + (half if all(name.endswith(PARTIAL) for name in there) else ""),
        )
