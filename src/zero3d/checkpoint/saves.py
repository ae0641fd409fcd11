"""The saves of one engine: one at a time, in the background if asked.

A save that was begun ends, on all ranks together, at the first step that finds it written everywhere, at the next save,
or when somebody waits for it. What went wrong with it is raised there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zero3d.assemble import Parts
from zero3d.checkpoint.place import Url
from zero3d.checkpoint.save import Saving
from zero3d.comm.mesh import Mesh
from zero3d.errors import UsageError
from zero3d.zero.shard import Shard


class Saves:
    """All ranks make the same calls."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._saving: Saving | None = None
        self._refuses = False

    def begin(self, parts: Parts, folder: str | Path | Url, background: bool, **what: Any) -> Path | Url:
        """Begins a save, of `save.Saving`'s arguments, once the one before has ended; waits for it unless it is in the
        `background`. -> where it will be. Collective."""
        self.refuse_half_changed("engine.save")
        self.wait()
        self._saving = Saving(parts, self._mesh, folder, background=background, **what)
        target = self._saving.target
        if not background:
            self.wait()
        return target

    @contextmanager
    def refusing(self, write: bool) -> Iterator[None]:
        """Within, if the user may `write` to weights, none is begun."""
        before, self._refuses = self._refuses, self._refuses or write
        try:
            yield
        finally:
            self._refuses = before

    def refuse_half_changed(self, call: str) -> None:
        """Raises `UsageError` where the user may be writing to weights."""
        if self._refuses:
            raise UsageError(
                f"{call} inside `with engine.gathered(write=True)`, where weights are half changed",
                hint="Leave it first, or do it before.",
            )

    def before_update(self, shard: Shard) -> None:
        """Returns when an update may change this shard."""
        saving = self._saving  # With offload this is asked on another thread than that which ends saves.
        if saving is not None:
            saving.before_update(shard)

    def poll(self) -> None:
        """Ends a save that all ranks have written. Collective while there is one."""
        if self._saving is None:
            return
        left = torch.tensor([int(not self._saving.written)], dtype=torch.int64, device=self._mesh.device)
        self._mesh.everyone.all_reduce(left, "ranks that still write").wait()
        if not int(left):
            self.wait()

    def wait(self, call: str = "") -> None:
        """Ends the save that was begun, if there is one. Collective. `call`: what is to come after it, where that may
        not be while the user may be writing to weights."""
        if call:
            self.refuse_half_changed(call)
        if self._saving is None:
            return
        try:
            self._saving.finish()
        finally:
            self._saving = None  # Only now: updates that still go on must ask until all is written.

    @property
    def pending(self) -> bool:
        return self._saving is not None
