"""What a save reads stays as it was when the save began, while training goes on.

Nothing is copied at first. Before an update changes a shard, what of it is still to be written is copied, as long as
all copies together stay within `ROOM`; beyond it the update waits until the writing has come that far.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Final

from torch import Tensor

from zero3d.checkpoint.write import Out
from zero3d.zero.shard import Shard

ROOM: Final = 1 << 28
"""Bytes of copies at a time."""


class Snapshot:
    """Of the tensors of a plan. owners: key -> whose update changes it; what has none may change with any."""

    def __init__(self, outs: Sequence[Out], owners: Mapping[str, Shard | None], room: int = ROOM) -> None:
        self._changed = Condition()
        self._room = room
        self._left = {out.key: out.tensor for out in outs}
        self._copies: dict[str, Tensor] = {}
        self._now = ""
        self._keys: dict[Shard | None, list[str]] = {}
        for out in outs:
            self._keys.setdefault(owners[out.key], []).append(out.key)

    @contextmanager
    def source(self, out: Out) -> Iterator[Tensor]:
        """On the thread that writes."""
        with self._changed:
            tensor = self._left.pop(out.key)
            self._now = out.key
        try:
            yield tensor
        finally:
            with self._changed:
                self._now = ""
                self._copies.pop(out.key, None)
                self._changed.notify_all()

    def before_update(self, shard: Shard) -> None:
        """On the thread that is about to update `shard`: returns when it may."""
        for key in (*self._keys.get(shard, ()), *self._keys.get(None, ())):
            with self._changed:
                while not self._is_free(key):
                    self._changed.wait()
                if key in self._left and key not in self._copies:
                    self._left[key] = self._copies[key] = self._left[key].clone()

    def end(self) -> None:
        """Nothing more will be written."""
        with self._changed:
            self._left.clear()
            self._copies.clear()
            self._now = ""
            self._changed.notify_all()

    def _is_free(self, key: str) -> bool:
        """Written, copied, or there is room for a copy."""
        if key == self._now:
            return False
        if key not in self._left or key in self._copies:
            return True
        held = sum(copy.nbytes for copy in self._copies.values())
        return held + self._left[key].nbytes <= self._room
