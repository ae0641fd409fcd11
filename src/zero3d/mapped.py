"""Memory of its own for buffers that an allocator's heap serves badly: large ones that live long, or come and go."""

import mmap

import torch
from torch import Tensor

from zero3d.computed import in_rehearsal

MAPPED = 1 << 20
"""Bytes from which a buffer on the CPU gets a mapping of its own."""


def fresh(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [numel] that live long.

    Large ones on the CPU are mapped by themselves: between the short-lived blocks of an allocator's heap they would
    leave holes that stay with the process, and they go back to the system when they are dropped.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < MAPPED or not hasattr(mmap, "MAP_PRIVATE") or in_rehearsal():
        return torch.zeros(numel, dtype=dtype, device=device)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype, count=numel)


def address(tensor: Tensor) -> tuple[int, int]:
    """What tensors have in common that begin at one place in memory, even where they have no data."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.itemsize


def kept_copy(source: Tensor, dtype: torch.dtype) -> Tensor:
    """A long-lived copy of the flat `source` in `dtype`."""
    return fresh(source.numel(), dtype, source.device).copy_(source)
