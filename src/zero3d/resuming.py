"""A run's checkpoints: saved as `[checkpoint]` says, and where a run that ended goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero3d.alike import refuse_own_folders
from zero3d.checkpoint import folders
from zero3d.checkpoint.load import Loaded
from zero3d.checkpoint.place import Place, Url, place
from zero3d.checkpoint.storage import storage_of
from zero3d.engine import Engine
from zero3d.errors import UsageError
from zero3d.records import CHECKPOINTS
from zero3d.stopping import Stopped

MUST_STAY = {
    "run": ("seed",),
    "model": ("preset", "path", "width", "layers", "heads", "kv_heads", "mlp_width", "tied"),
    "data": ("source", "tokenizer", "sequence_length", "global_batch"),
}
"""What a step's number stands for hangs on these: with others the same samples would come again, or never."""


class Checkpoints:
    """Those in checkpoint.folder, or left out in the folder `checkpoints` of run.out. `last`: the newest that this run
    made whole, or is making. UsageError: the folder is a URL that cannot be reached by what is installed."""

    def __init__(self, engine: Engine) -> None:
        self.last: Path | Url | None = None
        self._saved_step: int | None = None
        self._others = False
        self._engine = engine
        self._options = engine.config.checkpoint
        self._folder = place(self._options.folder or Path(engine.config.run.out) / CHECKPOINTS)
        storage_of(self._folder)

    def refuse_own(self, *, resume: bool) -> None:
        """UsageError: each machine has a folder of its own, where one is needed that all ranks write. Collective."""
        if isinstance(self._folder, Path) and (self._options.every or resume):
            own = self._options.folder is None  # Below run.out nothing is there until there is a checkpoint.
            folder, key = (self._folder.parent, "run.out") if own else (self._folder, "checkpoint.folder")
            refuse_own_folders(self._engine, folder, key)

    def resume(self, *, allow_missing: bool = False) -> Loaded | None:
        """Goes on from the newest whole one; None where there is none at all. Collective. allow_missing: as
        `Engine.load` has it.

        UsageError: it was made with another model, seed or data. DataError: none of those that are there is whole."""
        if not folders.any_in(self._folder):
            return None
        loaded = self._engine.load(self._folder, allow_missing=allow_missing)
        _refuse_other(loaded.config, self._engine.config.model_dump(mode="json"), loaded.path)
        return loaded

    def begin(self, loaded: Loaded | None) -> None:
        """Before the first step of a run that goes on from `loaded`. UsageError: it goes on from nothing, and its
        folder has the checkpoints of another, which would come first. (Those in run.out are moved aside with all that
        is there.)"""
        own = self._options.folder is None
        self._others = loaded is None and not own and folders.any_in(self._folder)
        if self._others and self._options.every:
            raise UsageError(
                "there are checkpoints of another run",
                where=str(self._folder),
                hint="Go on from them with --resume, or name another checkpoint.folder.",
            )

    def stepped(self, step: int, *, last: bool) -> None:
        """After `step` steps; `last`: none follows. Collective."""
        every = self._options.every
        if not every or (step % every and not last):
            return
        self._save(step, background=self._options.background and not last)

    def stop(self, step: int, steps: int, signal: str) -> Stopped:
        """A run that is to end after `step` of `steps` saves that, with checkpoint.every = 0 too. Collective."""
        if self._others:  # checkpoint.every is 0, or the run had not begun.
            why = f"nothing was saved, as {self._folder} has the checkpoints of another run"
            return Stopped(step=step, steps=steps, signal=signal, checkpoint=None, why=why)
        if self._saved_step == step:
            self._tidy()
        else:
            self._save(step, background=False)
        return Stopped(step=step, steps=steps, signal=signal, checkpoint=self.last)

    def _save(self, step: int, *, background: bool) -> None:
        self._tidy()  # The one before is whole by now, or becomes so.
        self.last = self._engine.save(self._folder, background=background)
        self._saved_step = step
        if not background:
            self._tidy()

    def _tidy(self) -> None:
        self._engine.finish_saving()
        if self.last is not None and self._engine.rank == 0:
            keep, every = self._options.keep, self._options.keep_every
            folders.keep(self._folder, last=keep, every=every, newest=self.last.name)


def _refuse_other(then: Mapping[str, Any], now: Mapping[str, Any], path: Place) -> None:
    for section, keys in MUST_STAY.items():
        for key in keys:
            before, after = then.get(section, {}).get(key), now[section][key]
            if before != after:
                raise UsageError(
                    f"{path.name} was made with {section}.{key} = {before!r}, and now it is {after!r}",
                    where=f"{section}.{key}",
                    hint="Set it back, or begin a run of its own: without --resume, or with another run.out.",
                )
