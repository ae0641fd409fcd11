"""What a user's model or loss raised where it ran on tensors without data: what it was, and where in their code."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

import zero3d
from zero3d.errors import UsageError, Zero3dError, one_line

OURS = Path(zero3d.__file__).parent
TORCHS = Path(torch.__file__).parent
PYTHONS = Path(traceback.__file__).parent
WITHOUT_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What torch raises where an operation needs more than shapes."""
NO_MEMORY = ("data pointer", "not supported for tensor subclasses")
"""How torch says that something other than its operations, such as NumPy, asked for a tensor's memory."""
NO_ROOM = "can't allocate memory"
VALUES_HINT = (
    "What happens there may depend on shapes, or on the batch's integers. Where it must depend on values, "
    "give the rehearsal a variant of the module that takes the usual way."
)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """What is raised inside and is no error of ours comes as a `UsageError` that begins with `what`."""
    try:
        yield
    except (Zero3dError, MemoryError):
        raise
    except Exception as error:
        raise _refusal(what, error) from error


def caller() -> FrameType:
    """The frame that asked torch for an operation."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if not _is_torchs(path) and (OURS / "dryrun") not in path.parents:
            break
        frame = frame.f_back
    return frame


def is_ours(frame: FrameType) -> bool:
    """Whether it is of the library and no model's."""
    return _is_ours(Path(frame.f_code.co_filename))


def place(frame: FrameType, line: int) -> str:
    """For a message."""
    return f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"


def _refusal(what: str, error: Exception) -> UsageError:
    frames = [
        place(frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not (_is_torchs(Path(frame.f_code.co_filename)) or is_ours(frame) or _is_pythons(frame))
    ]
    if isinstance(error, WITHOUT_DATA) or any(words in str(error) for words in NO_MEMORY):
        return UsageError(
            f"{what}: {one_line(error)}: a value is needed, and there are shapes alone",
            where="".join(frames[-1:]),
            hint=VALUES_HINT,
        )
    if NO_ROOM in str(error):
        return UsageError(
            f"{what}: the model or its loss makes a tensor that is larger than memory: {one_line(error)}",
            where="".join(frames[-1:]),
            hint="Give it smaller sizes: one parameter at a time is made for real, and so is what is made of integers.",
        )
    return UsageError(
        f"{what}: the model or its loss raised {one_line(error)}",
        where="".join(frames[-1:]),
        hint="Try one step of it in plain PyTorch: what it raises there too is to be mended in it. For what it raises "
        "here alone, give the rehearsal a variant of the module.",
    )


def _is_torchs(path: Path) -> bool:
    return TORCHS in path.parents or path.name == "<string>"


def _is_pythons(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return PYTHONS in path.parents and "site-packages" not in path.parts


def _is_ours(path: Path) -> bool:
    return OURS in path.parents and OURS / "models" not in path.parents
