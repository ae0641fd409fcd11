"""A self-check of tensor parallelism: what several ranks should hold alike is the same on them, in every bit.

Such are the parameters that are not cut (norms, biases of what is summed), and heads of keys and values that several
ranks hold. Each of these ranks updates its own copy, so nothing but equal gradients keeps the copies equal.
"""

import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zero3d.comm.mesh import Mesh
from zero3d.comm.texts import everyones_text
from zero3d.errors import DivergedError
from zero3d.params import ParamInfo
from zero3d.zero.shard import Shard


def check_replicas(infos: Sequence[ParamInfo], shards: Sequence[Shard], mesh: Mesh, tied: Collection[str] = ()) -> None:
    """Compares checksums of the master weights in this rank's shards over tp, and of those that are `tied` across
    stages over pp. Frozen parameters are left out, as nothing changes them. Collective over all ranks.

    Raises `DivergedError` on every rank, which names the first parameter that differs, and the ranks.
    """
    order = {info.name: number for number, info in enumerate(infos)}
    differences = [*_differences(infos, shards, mesh), *_untied(sorted(tied), shards, mesh)]
    found = min(differences, key=lambda one: order[one[0]], default=None)
    mine = f"{order[found[0]]:09} {found[1]}" if found else ""
    told = [text for text in everyones_text(mine, mesh.everyone, mesh.device, "checks of replicas") if text]
    if told:
        raise DivergedError(
            min(told).partition(" ")[2],
            hint="What a rank computes for it must not depend on the rank: see whether a module draws random numbers "
            'or reads data by itself, or parallel.plan lacks the style "partial" for it.',
        )


def _differences(infos: Sequence[ParamInfo], shards: Iterable[Shard], mesh: Mesh) -> Iterator[tuple[str, str]]:
    """(parameter, what to say of it) of each that differs among the ranks of this tp axis."""
    axis = mesh.axes["tp"].inner  # A check is no part of the step: it is not counted as sent.
    alike = {info.name: info.slicing for info in infos if info.slicing is None or info.slicing.copies > 1}
    # Ranks of one tp axis have the same index on dp and local shapes alike, so their pieces are of the same elements.
    names, sums = [], []
    for shard in shards:
        shard.settle()
        for piece in shard.pieces:
            if piece.name in alike:
                names.append(piece.name)
                sums.append(_checksum(shard.master[piece.start : piece.start + piece.numel]))
    mine = torch.tensor([len(sums), *sums], dtype=torch.int64, device=mesh.device)
    every = torch.empty(axis.size * len(mine), dtype=torch.int64, device=mesh.device)
    axis.all_gather(every, mine, "checks of replicas").wait()
    rows = every.view(axis.size, len(mine)).tolist()
    ranks = mesh.layout.peers(mesh.rank, "tp")
    for number, name in enumerate(names, start=1):
        slicing = alike[name]
        for index, row in enumerate(rows):
            first = 0 if slicing is None else slicing.holders(index)[0]
            if row[number] != rows[first][number]:
                yield name, f"{name} has other values on rank {ranks[index]} than on rank {ranks[first]}"
                break


def _untied(tied: Sequence[str], shards: Sequence[Shard], mesh: Mesh) -> Iterator[tuple[str, str]]:
    """The same of parameters that several stages have, over this pp axis; each is alone in its bucket."""
    if not tied:
        return
    axis = mesh.axes["pp"].inner
    sums = dict.fromkeys(tied, -1)
    for shard in shards:
        name = shard.bucket.slots[0].name
        if name in sums:
            shard.settle()
            sums[name] = _checksum(shard.master)
    mine = torch.tensor(list(sums.values()), dtype=torch.int64, device=mesh.device)
    every = torch.empty(axis.size * len(mine), dtype=torch.int64, device=mesh.device)
    axis.all_gather(every, mine, "checks of ties").wait()
    rows = every.view(axis.size, len(mine)).tolist()
    ranks = mesh.layout.peers(mesh.rank, "pp")
    for number, name in enumerate(tied):
        have = [index for index, row in enumerate(rows) if row[number] >= 0]
        other = next((index for index in have if rows[index][number] != rows[have[0]][number]), None)
        if other is not None:
            yield name, f"{name}, tied across stages, has other values on rank {ranks[other]} than on {ranks[have[0]]}"


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.detach().cpu().contiguous().view(torch.uint8).numpy().data)
