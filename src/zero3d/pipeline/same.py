"""Ranks that share a replica must see the same data: what one of them lacks, the others compute with."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from zero3d.contracts import Axis, Batch
from zero3d.errors import DataError
from zero3d.trees import tensors_in

CHECKED_STEPS = 3
"""The first steps of a run, in which batches are looked at."""
LOOKED_AT = 1 << 16
"""Elements of each tensor, spread over it."""


def refuse_other_data(batch: Batch, axis: Axis, replicas: Sequence[Sequence[int]], device: torch.device) -> None:
    """Raises `DataError` on all ranks of `axis` where one has another batch than the others of its replica, one of
    `replicas`. Collective."""
    if len(replicas) == axis.size:
        return
    digests = torch.empty(axis.size, dtype=torch.int64, device=device)
    axis.all_gather(digests, torch.tensor([digest(batch)], dtype=torch.int64, device=device), "digest of data").wait()
    found: list[int] = digests.tolist()
    for ranks in replicas:
        others = [rank for rank in ranks if found[rank] != found[ranks[0]]]
        if others:
            who = ", ".join(map(str, others))
            raise DataError(
                f"rank {who} got other data than rank {ranks[0]}, with which it shares a replica",
                hint="Ranks of one tensor-parallel group must get the same batch: draw it by engine.dp_index and "
                "engine.dp_size, not by rank and world size.",
            )


def digest(batch: Batch) -> int:
    """Of shapes, dtypes and some of the elements of all tensors."""
    found = 0
    for tensor in tensors_in(batch):
        found = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), found)
        found = zlib.crc32(_some(tensor).numpy().tobytes(), found)
    return found


def _some(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // LOOKED_AT)].cpu().contiguous().view(torch.uint8)
