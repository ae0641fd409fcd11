"""The file of `--out`: whether it can be written is known before the work, and it is written in one move."""

import errno
import os
from pathlib import Path

from zero3d.errors import DISK_FULL, UsageError

HINT = "Name a file in a folder that is there and yours."


def check_out(out: Path, *, suffix: str = "", what: str = "") -> None:
    """It can be written: a file is made beside it and removed. suffix, what: that its name ends with, and why.

    Raises `UsageError`.
    """
    if suffix and out.suffix != suffix:
        named = out.with_suffix(suffix) if out.name else f"x{suffix}"
        raise UsageError(f"--out {out}: {what}", hint=f"Name it {named}.")
    file, part = _places(out)
    try:
        if file.exists() and not file.is_file():
            kind = "a folder" if file.is_dir() else "no plain file"
            raise UsageError(f"--out {out} cannot be written: it is {kind}", hint=HINT)
        if file.exists() and not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        part.touch()  # Permissions alone do not tell: to root all of them are given.
        part.unlink(missing_ok=True)  # Ranks of one machine may look at once.
    except OSError as error:
        raise _refused(out, error) from None


def write_out(out: Path, text: str) -> None:
    """In one move, so that who reads it meanwhile finds all of the old text or all of the new.

    Raises `UsageError`; `OSError` where the disk is full.
    """
    file, part = _places(out)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno in DISK_FULL:
            raise
        raise _refused(out, error) from None


def _places(out: Path) -> tuple[Path, Path]:
    """The file, of a link the one that it leads to, and one beside it."""
    file = Path(os.path.realpath(out))
    return file, file.with_name(f".{file.name}.part")


def _refused(out: Path, error: OSError) -> UsageError:
    return UsageError(f"--out {out} cannot be written: {error.strerror}", hint=HINT)
