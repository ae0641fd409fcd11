"""Where a thread of this process is: the user's call that it is in, and the user's lines above it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

CALLED_BY_USERS = ("Engine", "Sharded")
"""The classes whose methods users call."""
LINES = 5

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = (_OURS, "<frozen", f"{Path(sys.prefix) / 'lib'}", f"{Path(sys.base_prefix) / 'lib'}")


def call_of(thread: int) -> str:
    """Such as "engine.step"; "" where the thread is in none of ours, as in a backward of a loop of the user's own."""
    for code, _ in _frames(thread):
        owner, _, method = code.co_qualname.partition(".")
        if owner in CALLED_BY_USERS and code.co_filename.startswith(_OURS):
            return f"{owner.lower()}.{method}"
    return ""


def lines_of(thread: int) -> list[str]:
    """The innermost lines that are neither ours nor a library's, such as "train.py:12 in main", outermost first."""
    found = [
        f"{Path(code.co_filename).name}:{line} in {code.co_name}"
        for code, line in _frames(thread)
        if not code.co_filename.startswith(_LIBRARIES)
    ]
    return found[-LINES:]


def _frames(thread: int) -> Iterator[tuple[CodeType, int]]:
    """Outermost first."""
    frame: FrameType | None = sys._current_frames().get(thread)
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return reversed(found)
