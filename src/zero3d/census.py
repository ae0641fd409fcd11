"""What a rank really holds: counted from the live storages, each once."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from zero3d.assemble import Parts
from zero3d.contracts import Batch

KINDS = ("weights", "gradients", "optimizer", "buffers")


def held(parts: Parts) -> dict[str, int]:
    """kind -> bytes. Memory that serves two kinds counts for the first of `KINDS`; with offload "host", "disk" and
    "staging" follow, and the others are what the device holds."""
    kinds = (*KINDS, *parts.homes.kinds)
    found = list(tensors(parts))
    seen: set[int] = set()
    return {kind: _fresh_bytes((one.untyped_storage() for of, one in found if of == kind), seen) for kind in kinds}


def tensors(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor) of all that is held over steps; by kinds in the order of `held`, what serves two counts once."""
    found = [*parts.replica.held(), *parts.optimizer.held(), *parts.homes.held()]
    found += [("buffers", one) for axis in parts.axes for one in axis.held()]
    found += [("buffers", one) for one in parts.model.buffers()]
    kinds = (*KINDS, *parts.homes.kinds)
    yield from sorted(found, key=lambda one: kinds.index(one[0]))


def activations(parts: Parts, micro_batch: Batch) -> int:
    """Bytes that autograd keeps at the end of a forward of `micro_batch`, weights apart. Collective at level 3."""
    if micro_batch is None:
        return 0
    saved: list[torch.UntypedStorage] = []

    def count(tensor: Tensor) -> None:
        # Nothing goes into the graph: no backward follows, and a tensor in its own graph would never be freed.
        saved.append(tensor.untyped_storage())

    buffers = [(buffer, buffer.clone()) for buffer in parts.model.buffers()]
    with parts.randomness.step(0), torch.autograd.graph.saved_tensors_hooks(count, lambda nothing: nothing):
        for stage in parts.stages.values():
            stage.forward(0, micro_batch)
            stage.start()
    parts.pipeline.settle()
    seen = {tensor.untyped_storage()._cdata for _, tensor in parts.replica.held()}
    # A released weight has no memory by now: what autograd keeps of it counts nothing.
    total = _fresh_bytes(saved, seen)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return total


def dtypes(parts: Parts) -> list[tuple[str, str]]:
    """(what, dtypes) as they are now."""
    shards = parts.replica.shards
    state = [value for kind, value in parts.optimizer.held() if kind in ("optimizer", "host", "disk")]
    rows = {
        "weights": [parameter.dtype for parameter in parts.model.parameters()],
        "master weights": [shard.master.dtype for shard in shards],
        "held gradients": [shard.gradient.dtype for shard in shards],
        "travelling gradients": parts.replica.wire_dtypes(),
        "sums over ranks": [torch.float32],
        "optimizer state": [tensor.dtype for tensor in state] or [shard.master.dtype for shard in shards],
    }
    return [(what, _names(found)) for what, found in rows.items()]


def _names(found: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in found}))


def _fresh_bytes(storages: Iterable[torch.UntypedStorage], seen: set[int]) -> int:
    total = 0
    for storage in storages:
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
