"""Saving: each rank writes what it alone has, and its share of what several have; then one rename.

    all        agree on what is saved where; is there room?
    rank 0     makes the folder under a temporary name
    each       writes its file and waits until it is on the disk
    rank 0     writes the manifest, and gives the folder its name

At a URL, where nothing can be renamed, files have names of their own, and the manifest, written last, makes them a
checkpoint (`storage`). Until the rename, or the manifest, there is no checkpoint of that name, and whatever was saved
before is as it was.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from secrets import token_hex
from threading import Thread
from typing import Any, get_args

from zero3d.assemble import Parts
from zero3d.checkpoint.folders import check_size
from zero3d.checkpoint.manifest import Scaling, Sizes, What, dump
from zero3d.checkpoint.merge import merge, of_json
from zero3d.checkpoint.mine import Mine
from zero3d.checkpoint.place import Draft, Url, name_of, place
from zero3d.checkpoint.snapshot import Snapshot
from zero3d.checkpoint.state import Holdings
from zero3d.checkpoint.storage import Storage, storage_of
from zero3d.checkpoint.together import Together
from zero3d.comm.mesh import Mesh
from zero3d.comm.roll import PATIENCE, call_roll
from zero3d.errors import OutOfSpaceError, UsageError
from zero3d.zero.shard import Shard

ROOM = 1 << 20
"""Bytes that must be free besides what the files take."""


def save(
    parts: Parts,
    mesh: Mesh,
    folder: str | os.PathLike[str] | Url,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    what: What = "all",
    patience: float = PATIENCE,
) -> Path | Url:
    """Saves the state after `step` steps in `folder`, a path or a URL, which all ranks reach. -> the checkpoint's own
    folder. Collective.

    extra, config: what else is to be kept, of JSON's types; rank 0's. what: "all"; "weights" and buffers alone; of
    what is "trainable" weights and optimizer state, and buffers.

    An error is the same one on every rank, and names the rank it came from: `DivergedError` if ranks have not come
    within `patience` seconds, or ask for different things; `OutOfSpaceError`; `UsageError` for what cannot be saved or
    written. No checkpoint has come or changed then.
    """
    saving = Saving(
        parts, mesh, folder, step=step, extra=extra, config=config, what=what, patience=patience, background=False
    )
    return saving.finish()


class Saving:
    """A save that has begun, with the same arguments; making it is collective. In the `background` a thread writes and
    training goes on until `finish`; `before_update` keeps what is still to be read."""

    def __init__(
        self,
        parts: Parts,
        mesh: Mesh,
        folder: str | os.PathLike[str] | Url,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        what: What = "all",
        patience: float = PATIENCE,
        background: bool = True,
    ) -> None:
        call_roll("save", patience)
        self._together = together = Together(mesh.everyone, mesh.device)
        home = together.do("where to save", lambda: place(folder))
        self.target: Path | Url = home / name_of(max(step, 0))
        together.do("what to save", lambda: _refuse(step, what, extra or {}))
        _refuse_differing(together.tell(json.dumps([str(folder), step, what]), "what to save"))
        parts.replica.settle()
        holdings = Holdings(parts, mesh)
        mine = together.do("the plan of its file", lambda: Mine(holdings, what, copies_buffers=background))
        sizes = [int(text) for text in together.tell(str(mine.plan.size), "sizes of files")]
        self._storage = together.do("where to save", lambda: storage_of(home))
        self._draft = self._storage.draft(self.target.name, together.from_first(token_hex(8), "temporary name"))
        self._merge = partial(
            merge,
            holdings,
            Sizes(dp=mesh.layout.dp, tp=mesh.layout.tp, pp=mesh.layout.pp),
            step=step,
            what=what,
            learning_rate=parts.optimizer.learning_rate,
            scaler=Scaling(**parts.scaler.state()),
            extra=deepcopy(extra or {}),  # It is written at the very end.
            config=config or {},
        )
        self._snapshot = Snapshot(mine.plan.outs, mine.owners)
        self._write = partial(mine.write, self._draft.folder, mesh.rank, self._snapshot.source, self._draft.mark)
        self._described: Future[str] = Future()
        with self._or_nothing():
            together.first("making room", lambda: _make_room(self._storage, self._draft, sum(sizes)))
        if background:
            Thread(target=self._run, name="zero3d save", daemon=True).start()
        else:
            self._run()

    @property
    def written(self) -> bool:
        """Whether this rank has nothing more to write, or could not."""
        return self._described.done()

    def before_update(self, shard: Shard) -> None:
        """Returns when an update may change this shard."""
        self._snapshot.before_update(shard)

    def finish(self) -> Path | Url:
        """Waits for all ranks' files, and makes the checkpoint whole. Collective."""
        with self._or_nothing():
            described = self._together.do("writing its file", self._described.result)
            everything = self._together.to_first(described, "lists of pieces")
            self._together.first("finishing the checkpoint", lambda: self._publish(everything))
        return self.target

    def _publish(self, everything: list[str]) -> None:
        manifest = self._merge(everything)
        for file in manifest.files:
            check_size(self._draft.folder / file.name, file.size)
        self._storage.publish(self._draft, dump(manifest))

    def _run(self) -> None:
        try:
            self._described.set_result(self._write())
        except BaseException as error:
            self._described.set_exception(error)
        finally:
            self._snapshot.end()

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._together.index == 0:
                self._storage.discard(self._draft)
            raise


def _refuse(step: int, what: str, extra: Mapping[str, Any]) -> None:
    if step < 0:
        raise UsageError(f"step = {step}", hint="It is the number of steps that were made.")
    if what not in get_args(What):
        raise UsageError(f'what = "{what}"', hint=f"It is one of {', '.join(get_args(What))}.")
    if not isinstance(extra.get("own", {}), dict):
        raise UsageError(f"extra is a {type(extra['own']).__name__}", hint="Give a dict.")
    of_json(extra, "extra")  # It is written at the very end.


def _refuse_differing(told: list[str]) -> None:
    other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
    if other is not None:
        one, two = (", ".join(map(str, json.loads(told[rank]))) for rank in (0, other))
        raise UsageError(
            f"rank 0 saves {one}, and rank {other} saves {two} (folder, step, what)",
            hint="All ranks must save the same step to the same folder.",
        )


def _make_room(storage: Storage, draft: Draft, needed: int) -> None:
    storage.clear(draft)
    if isinstance(draft.folder, Path):  # How much a remote can hold nobody knows.
        free = shutil.disk_usage(draft.folder.parent).free
        if free < needed + ROOM:
            raise OutOfSpaceError(
                f"the checkpoint takes {(needed + ROOM) / 1e6:.1f} MB, what is written beside it counted, and "
                f"{free / 1e6:.1f} MB are free",
                where=str(draft.folder.parent),
                hint="Free some space there, or save elsewhere.",
            )
    storage.begin(draft)
