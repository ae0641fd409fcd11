"""A model's weights as a hub folder, from a checkpoint or from the ranks that train.

    checkpoint   one process reads a tensor's pieces, and writes it
    ranks        each sends rank 0 the pieces that it has; rank 0 writes the tensor

Either way nothing is in memory but the tensor that is on its way.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero3d.assemble import Parts
from zero3d.checkpoint.folders import Found
from zero3d.checkpoint.hub import KEPT_CONFIG, SHARD_BYTES, Weight, config_of
from zero3d.checkpoint.hub_folder import Format, HubFolder, groups
from zero3d.checkpoint.manifest import Entry
from zero3d.checkpoint.place import Url, place
from zero3d.checkpoint.read import DTYPES
from zero3d.checkpoint.rebuild import Rebuilder, Tell
from zero3d.checkpoint.sending import Pieces
from zero3d.checkpoint.state import Holdings
from zero3d.checkpoint.together import Together
from zero3d.comm.mesh import Mesh
from zero3d.comm.roll import PATIENCE, call_roll
from zero3d.errors import DataError, RankFailedError, UsageError

GROUP = 64_000_000
"""Bytes that are written between two looks at whether all ranks are well."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """files: all that were written; weights: what is in them, ties once."""

    folder: Path
    files: Sequence[Path]
    weights: Sequence[Weight]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.weights)


@dataclass(frozen=True, kw_only=True)
class Style:
    """form: "safetensors", or "torch" for one file that torch.load reads; dtype: of all real numbers, None: the
    model's own; shard_bytes: of a file, at most, unless a tensor is larger."""

    form: Format = "safetensors"
    dtype: torch.dtype | None = None
    shard_bytes: int = SHARD_BYTES

    def of(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype


def export_checkpoint(
    found: Found, folder: str | os.PathLike[str], style: Style | None = None, tell: Tell = lambda done, total: None
) -> Exported:
    """Writes the weights and buffers of a checkpoint into `folder`, which must be new or empty.

    They get the dtypes that the model has, where `style.dtype` asks for no other: a checkpoint has the fp32 master
    weights of what is trained. tell: is told (bytes, of so many) as it goes on. DataError: a file is not what was
    written; UsageError: the folder cannot be used; OutOfSpaceError. Nothing is left in the folder then.
    """
    style = style or Style()
    entries = {entry.name: entry for entry in found.manifest.tensors if entry.kind != "state"}
    weights = [_weight(entry, style) for entry in entries.values()]
    if not weights:
        raise DataError("the checkpoint has no weights", where=str(found.path), hint="Take another.")
    config = found.manifest.extra.get(KEPT_CONFIG)
    hub = HubFolder(
        _on_this_machine(folder),
        weights,
        form=style.form,
        shard_bytes=style.shard_bytes,
        config=config if isinstance(config, dict) else None,
    )
    done, total = 0, sum(one.nbytes for one in weights)
    with hub, Rebuilder(found.path, found.manifest) as rebuilder:
        for weight in hub.order:
            hub.add(rebuilder.tensor(entries[weight.name], weight.dtype))
            done += weight.nbytes
            tell(done, total)
        hub.finish()
    return Exported(folder=hub.folder, files=hub.paths, weights=weights)


def export(
    parts: Parts,
    mesh: Mesh,
    folder: str | os.PathLike[str],
    style: Style | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    patience: float = PATIENCE,
) -> Exported:
    """Writes the model's weights and persistent buffers, as they are now, into `folder`, which must be new or empty and
    which rank 0 alone must reach. Collective.

    Tensors have the names, shapes and dtypes of the model that the engine was given, whatever a rank has of them.
    config: for config.json; None: a Transformers model's own. An error is the same one on every rank, and nothing is
    left in the folder: `UsageError`, `OutOfSpaceError`, `DivergedError` if ranks have not come within `patience`
    seconds.
    """
    call_roll("export", patience)
    style = style or Style()
    together = Together(mesh.everyone, mesh.device)
    home = together.do("where to export", lambda: _on_this_machine(folder))
    _refuse_differing(together.tell(f"{style.form}, {style.dtype}, {style.shard_bytes}", "how to export"))
    parts.replica.settle()
    holdings = Holdings(parts, mesh)
    weights = list(_weights(holdings, style))
    hub = HubFolder(
        home,
        weights,
        form=style.form,
        shard_bytes=style.shard_bytes,
        config=config_of(parts.model) if config is None else config,
    )
    pieces = Pieces(holdings, mesh.everyone, mesh.device, together)
    entered = False
    try:
        together.first("making the folder", hub.__enter__)
        entered = True
        for group in groups(hub.order, GROUP):
            together.do("writing weights", _writing(group, pieces, hub))
        together.first("finishing the folder", hub.finish)
    except BaseException as error:
        if entered and mesh.everyone.index == 0:
            hub.__exit__(type(error), error, error.__traceback__)
        raise
    return Exported(folder=hub.folder, files=hub.paths, weights=weights)


def _on_this_machine(folder: str | os.PathLike[str]) -> Path:
    home = place(folder)
    if isinstance(home, Url):
        raise UsageError(
            "what is exported goes to a folder of this machine", where=str(home), hint="Copy it from there."
        )
    return home


def _refuse_differing(told: Sequence[str]) -> None:
    other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
    if other is not None:
        raise UsageError(
            f"rank 0 exports as {told[0]}, and rank {other} as {told[other]} (format, dtype, bytes of a file)",
            hint="All ranks must export in the same way.",
        )


def _writing(group: Sequence[Weight], pieces: Pieces, hub: HubFolder) -> Callable[[], None]:
    """Ranks go on sending after an error, so that none waits for ever; it is told when all are through."""

    def work() -> None:
        failed: Exception | None = None
        for weight in group:
            try:
                whole = pieces.gather(weight)
                if whole is not None and failed is None:
                    hub.add(whole)
            except RankFailedError:
                raise
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    return work


def _weight(entry: Entry, style: Style) -> Weight:
    dtype = style.of(DTYPES[entry.made or entry.dtype])
    return Weight(name=entry.name, shape=entry.shape, dtype=dtype, ties=entry.ties)


def _weights(holdings: Holdings, style: Style) -> Iterator[Weight]:
    """The same on every rank."""
    for info in holdings.infos.values():
        yield Weight(name=info.name, shape=info.shape, dtype=style.of(info.dtype), ties=info.ties)
    for name, buffer in holdings.buffer_names.items():
        yield Weight(name=name, shape=tuple(buffer.shape), dtype=style.of(buffer.dtype))
