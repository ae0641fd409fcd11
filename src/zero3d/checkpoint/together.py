"""Work that each rank does by itself and that all must be through with: an error of one is an error of all."""

import json
import os
import re
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from zero3d.comm.texts import everyones_text
from zero3d.contracts import Axis
from zero3d.errors import DISK_FULL, DataError, OutOfSpaceError, RankFailedError, UsageError, Zero3dError

Result = TypeVar("Result")

NAMED = re.compile(r"rank \d+: ")
"""How an error begins that came through here before: of work that is part of other work."""
KINDS: dict[str, type[Zero3dError]] = {
    kind.__name__: kind for kind in (UsageError, DataError, OutOfSpaceError, RankFailedError)
}


class Together:
    """All ranks of a run."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.index = axis.index
        self.size = axis.size
        self._axis = axis
        self._device = device

    def do(self, what: str, work: Callable[[], Result]) -> Result:
        """What `work` gives here, once it is done everywhere. Where it raised on a rank, all raise that rank's error,
        which names it; of several that of the first rank. what: what errors and records call it. Collective."""
        mine: Exception | None = None
        try:
            result = work()
        except Exception as error:
            mine = error
        told = self.tell(_told(mine), f"how {what} went")
        for rank, text in enumerate(told):
            if text:
                raise _error(rank, json.loads(text)) from mine
        return result

    def first(self, what: str, work: Callable[[], Result]) -> Result | None:
        """The same where rank 0 alone has something to do; None elsewhere."""
        return self.do(what, work if self.index == 0 else lambda: None)

    def tell(self, mine: str, label: str) -> list[str]:
        """Everyone's text, by rank. Collective."""
        return everyones_text(mine, self._axis, self._device, label)

    def from_first(self, text: str, label: str) -> str:
        """Rank 0's text, however long. Collective."""
        data = _bytes(text if self.index == 0 else "")
        size = torch.tensor([data.numel()], dtype=torch.int64, device=self._device)
        self._axis.broadcast(size, 0, f"length of {label}").wait()
        out = data.to(self._device) if self.index == 0 else data.new_empty(int(size), device=self._device)
        if out.numel():
            self._axis.broadcast(out, 0, label).wait()
        return out.cpu().numpy().tobytes().decode()

    def to_first(self, text: str, label: str) -> list[str]:
        """Everyone's text, by rank, on rank 0; nothing elsewhere. One after the other, as they may be long.
        Collective."""
        mine = _bytes(text).to(self._device)
        size = torch.tensor([mine.numel()], dtype=torch.int64, device=self._device)
        sizes = torch.empty(self.size, dtype=torch.int64, device=self._device)
        self._axis.all_gather(sizes, size, f"lengths of {label}").wait()
        if self.index:
            if mine.numel():
                self._axis.send(mine, 0, label).wait()
            return []
        found = [text]
        for rank, numel in enumerate(sizes.tolist()[1:], start=1):
            out = mine.new_empty(numel)
            if numel:
                self._axis.recv(out, rank, label).wait()
            found.append(out.cpu().numpy().tobytes().decode())
        return found


def _bytes(text: str) -> Tensor:
    data = bytearray(text.encode())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _told(error: Exception | None) -> str:
    if error is None:
        return ""
    kind, message, where, hint = "RankFailedError", f"{type(error).__name__}: {error}", "", "See that rank's own error."
    if isinstance(error, Zero3dError):
        named = type(error).__name__
        kind, message, where, hint = named if named in KINDS else kind, error.message, error.where, error.hint
    elif isinstance(error, OSError):
        kind = "OutOfSpaceError" if error.errno in DISK_FULL else "UsageError"
        message, where = os.strerror(error.errno) if error.errno else str(error), str(error.filename or "")
        hint = (
            "Free some space there, or save elsewhere."
            if error.errno in DISK_FULL
            else "All ranks must be able to reach the folder, and to write to it where they save."
        )
    elif isinstance(error, MemoryError):
        kind, hint = "OutOfSpaceError", "Use more ranks, or zero.level = 3."
    return json.dumps([kind, message, where, hint])


def _error(rank: int, told: list[str]) -> Zero3dError:
    kind, message, where, hint = told
    named = message if NAMED.match(message) else f"rank {rank}: {message}"
    return KINDS[kind](named, where=where, hint=hint)
