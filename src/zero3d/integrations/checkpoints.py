"""A Trainer's checkpoint-N folders: where zero3d's own checkpoint is in one, and which of them is whole."""

import json
import re
from pathlib import Path

from zero3d.checkpoint.folders import newest
from zero3d.errors import DataError

INSIDE = "zero3d"
"""The folder of zero3d's checkpoint in a Trainer's."""
STATE = "trainer_state.json"
"""Written last by the Trainer."""
_NAME = re.compile(r"checkpoint-(\d+)")


def newest_whole(folder: str | Path) -> Path:
    """The newest checkpoint-N in `folder` whose files are all there. Raises `DataError` where there is none."""
    where, skipped = Path(folder), list[str]()
    found = [(int(match[1]), path) for path in where.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        try:
            require_ours(path)
            newest(path / INSIDE)
            json.loads((path / STATE).read_text(encoding="utf-8"))
            return path
        except (DataError, OSError, ValueError) as error:
            skipped.append(f"{path.name}: {error}".splitlines()[0])
    raise DataError(
        f"no whole checkpoint: {'; '.join(skipped) or 'there is none'}",
        where=str(where),
        hint="Train without resume_from_checkpoint, or give the folder of one.",
    )


def require_ours(path: str | Path) -> Path:
    """zero3d's folder in the checkpoint at `path`. Raises `DataError` where the checkpoint has none."""
    inside = Path(path) / INSIDE
    if not inside.is_dir():
        raise DataError(
            "the checkpoint has no part of zero3d's, so its optimizer state cannot be sharded",
            where=str(path),
            hint="Begin a new training from its weights: from_pretrained(checkpoint), without resume_from_checkpoint. "
            "(save_only_model=True leaves zero3d's part out.)",
        )
    return inside
