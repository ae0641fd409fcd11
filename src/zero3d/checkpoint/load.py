"""Loading: each rank reads what it will hold, from whatever files it lies in.

    rank 0     finds the newest whole checkpoint, and tells the others its manifest
    all        is it this model's? nothing has been written yet
    each       reads its ranges beside what there is, checked as they come
    all        have read all they want: it takes the place of what there was

A checkpoint that turns out to be damaged while it is read gives way to the one before it; where there is none, no rank
has changed anything. Until all have read, a rank has room for as much as it will hold once more.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero3d.assemble import Parts
from zero3d.checkpoint import folders
from zero3d.checkpoint.fit import Fit, fit
from zero3d.checkpoint.manifest import Manifest, Sizes, What, parse
from zero3d.checkpoint.place import Place, Url, place
from zero3d.checkpoint.read import carry_out
from zero3d.checkpoint.state import Holdings
from zero3d.checkpoint.together import Together
from zero3d.checkpoint.wanted import Wanted
from zero3d.comm.mesh import Mesh
from zero3d.comm.roll import PATIENCE, call_roll
from zero3d.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was loaded, the same on every rank but for `bytes_read`.

    params, moments, buffers: how many whole tensors of each; missing, unexpected: what was allowed to be; skipped:
    newer checkpoints that could not be used, and why; bytes_read: by this rank, from files of tensors.
    """

    path: Place
    step: int
    what: What
    extra: Mapping[str, Any]
    config: Mapping[str, Any] = field(repr=False)
    layout: Sizes
    learning_rate: float
    params: int
    moments: int
    buffers: int
    missing: Sequence[str]
    unexpected: Sequence[str]
    skipped: Sequence[str]
    bytes_read: int


def load(
    parts: Parts,
    mesh: Mesh,
    folder: str | os.PathLike[str] | Url,
    *,
    allow_missing: bool = False,
    patience: float = PATIENCE,
) -> Loaded:
    """Master weights, optimizer state, buffers and loss scale become those of the newest whole checkpoint in `folder`,
    or of the one that `folder` is, whatever layout saved it; it may be a URL. Collective.

    allow_missing: what the checkpoint lacks stays as it is, state of the optimizer begins anew, and what it has
    besides is left out.

    An error is the same one on every rank, and has changed nothing on any: `DataError` where there is no whole
    checkpoint; `UsageError` where it is another model's; `DivergedError` if ranks have not come within `patience`
    seconds.
    """
    call_roll("load", patience)
    together = Together(mesh.everyone, mesh.device)
    home = together.do("where to look", lambda: place(folder))
    loading = Loading(together, Holdings(parts, mesh), home)
    while True:
        try:
            return loading.try_next(allow_missing=allow_missing)
        except DamagedError as damaged:
            loading.skipped.append(damaged.why)


class DamagedError(Exception):
    """A checkpoint that looked whole is not what was written; `why`: which, and in what."""

    def __init__(self, path: Place, error: DataError) -> None:
        self.why = _why(path, error)


class Loading:
    """One call of `load`. skipped: what could not be used, on every rank."""

    def __init__(self, together: Together, holdings: Holdings, folder: Path | Url) -> None:
        self._together = together
        self._holdings = holdings
        self._folder = folder
        self._left = together.first("looking for checkpoints", lambda: folders.candidates(folder)) or []
        self.skipped: list[str] = []

    def try_next(self, *, allow_missing: bool) -> Loaded:
        """Raises `DamagedError` where there may be another."""
        do, parts = self._together.do, self._holdings.parts
        path, text = self._next()
        manifest = do("reading the manifest", lambda: parse(text, path))
        fitting = fit(manifest, self._holdings)
        do("comparing it with the model", lambda: fitting.check(allow_missing=allow_missing))
        _receive(parts)
        wanted = do("looking for what it needs", lambda: Wanted(self._holdings, fitting))
        try:
            read = do("reading", lambda: carry_out(wanted.jobs, path, manifest))
        except DataError as error:
            wanted.let_go()
            raise DamagedError(path, error) from error
        do("taking over what it read", wanted.keep)
        parts.replica.publish([*parts.replica.frozen, *parts.replica.shards])
        parts.optimizer.fetch()
        parts.scaler.set_state(manifest.scaler.model_dump())
        return _loaded(path, manifest, fitting, self.skipped, read)

    def _next(self) -> tuple[Path | Url, str]:
        """The next whole one and its manifest, as rank 0 sees it; what it finds not to be whole is skipped."""
        found = self._together.first("looking for checkpoints", self._look)
        told = json.dumps([str(found[0]), found[1], self.skipped]) if found else ""
        path, text, self.skipped = json.loads(self._together.from_first(told, "manifest"))
        return place(path), text

    def _look(self) -> tuple[Path | Url, str]:
        while self._left:
            path = self._left.pop(0)
            try:
                return path, folders.whole(path)[0]
            except DataError as error:
                self.skipped.append(_why(path, error))
        raise folders.none_in(self._folder, self.skipped)


def _why(path: Place, error: DataError) -> str:
    place = f" ({Path(error.where).name})" if error.where else ""
    return f"{path.name}: {error.message}{place}"


@torch.no_grad()
def _receive(parts: Parts) -> None:
    """Master weights may be on their way to other ranks since the last step: nothing is written, all has arrived."""
    infos = {info.name: info.local for info in parts.infos}
    for shard in (*parts.replica.shards, *parts.replica.frozen):
        none = shard.weights.new_empty(0)
        parts.replica.write(infos[shard.bucket.slots[0].name], slice(0, 0), none)


def _loaded(path: Place, manifest: Manifest, fitting: Fit, skipped: Sequence[str], read: int) -> Loaded:
    return Loaded(
        path=path,
        step=manifest.step,
        what=manifest.what,
        extra=manifest.extra,
        config=manifest.config,
        layout=manifest.layout,
        learning_rate=manifest.learning_rate,
        params=len(fitting.weights),
        moments=sum(len(entries) for entries in fitting.states.values()),
        buffers=len(fitting.buffers),
        missing=tuple(fitting.missing),
        unexpected=tuple(fitting.unexpected),
        skipped=tuple(skipped),
        bytes_read=read,
    )
