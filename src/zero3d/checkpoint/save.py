"""Saving: each rank writes what it alone has, and its share of what several have; then one rename.

    all        agree on what is saved where; is there room?
    rank 0     makes the folder under a temporary name
    each       writes its file and waits until it is on the disk
    rank 0     writes the manifest, and gives the folder its name

Until the rename there is no checkpoint of that name, and whatever was saved before is as it was.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from zero3d.assemble import Parts
from zero3d.checkpoint import folders
from zero3d.checkpoint.manifest import MANIFEST, Sizes, What, dump
from zero3d.checkpoint.merge import merge
from zero3d.checkpoint.mine import Mine
from zero3d.checkpoint.state import Holdings
from zero3d.checkpoint.together import Together
from zero3d.comm.mesh import Mesh
from zero3d.comm.roll import PATIENCE, call_roll
from zero3d.errors import OutOfSpaceError, UsageError

ROOM = 1 << 20
"""Bytes that must be free besides what the files take."""


def save(
    parts: Parts,
    mesh: Mesh,
    folder: str | os.PathLike[str],
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    what: What = "all",
    patience: float = PATIENCE,
) -> Path:
    """Saves the state after `step` steps in `folder`, which all ranks reach. -> the checkpoint's folder. Collective.

    extra, config: what else is to be kept, of JSON's types; rank 0's. what: "all"; "weights" and buffers alone; of
    what is "trainable" weights and optimizer state, and buffers.

    An error is the same one on every rank, and names the rank it came from: `DivergedError` if ranks have not come
    within `patience` seconds, or ask for different things; `OutOfSpaceError`; `UsageError` for what cannot be saved or
    written. No checkpoint has come or changed then.
    """
    call_roll("save", patience)
    together = Together(mesh.everyone, mesh.device)
    target = Path(folder) / folders.name_of(max(step, 0))
    together.do("what to save", lambda: _refuse(step, what))
    _refuse_differing(together.tell(json.dumps([str(folder), step, what]), "what to save"))
    parts.replica.settle()
    holdings = Holdings(parts, mesh)
    mine = together.do("the plan of its file", lambda: Mine(holdings, what))
    sizes = [int(text) for text in together.tell(str(mine.plan.size), "sizes of files")]
    temporary = Path(together.from_first(str(folders.temporary(target)), "temporary name"))
    try:
        together.first("making room", lambda: _make_room(temporary, sum(sizes)))
        described = together.do("writing its file", lambda: mine.write(temporary, mesh.rank))
        everything = together.to_first(described, "lists of pieces")

        def finish() -> None:
            layout = Sizes(dp=mesh.layout.dp, tp=mesh.layout.tp, pp=mesh.layout.pp)
            given = {"extra": extra or {}, "config": config or {}}
            manifest = merge(holdings, layout, everything, step=step, what=what, **given)
            for file in manifest.files:
                folders.check_size(temporary / file.name, file.size)
            _write_synced(temporary / MANIFEST, dump(manifest))
            folders.sync(temporary)
            folders.publish(temporary, target)

        together.first("finishing the checkpoint", finish)
    except BaseException:
        if mesh.everyone.index == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _refuse(step: int, what: str) -> None:
    if step < 0:
        raise UsageError(f"step = {step}", hint="It is the number of steps that were made.")
    if what not in get_args(What):
        raise UsageError(f'what = "{what}"', hint=f"It is one of {', '.join(get_args(What))}.")


def _refuse_differing(told: list[str]) -> None:
    other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
    if other is not None:
        one, two = (", ".join(map(str, json.loads(told[rank]))) for rank in (0, other))
        raise UsageError(
            f"rank 0 saves {one}, and rank {other} saves {two} (folder, step, what)",
            hint="All ranks must save the same step to the same folder.",
        )


def _make_room(temporary: Path, needed: int) -> None:
    folder = temporary.parent
    folder.mkdir(parents=True, exist_ok=True)
    for left in list(folders.leftovers(folder, temporary)):
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(folder).free
    if free < needed + ROOM:
        raise OutOfSpaceError(
            f"the checkpoint takes {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free",
            where=str(folder),
            hint="Free some space there, or save elsewhere.",
        )
    temporary.mkdir()


def _write_synced(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
