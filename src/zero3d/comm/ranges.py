"""Ranges of a bucket, of which each rank has its own, brought together element by element."""

import torch
from torch import Tensor

from zero3d.comm.bucket import Bucket
from zero3d.contracts import Axis


def overlap(one: slice, other: slice, base: int) -> slice | None:
    """What two ranges share, counted from `base`; None if nothing."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(start - base, stop - base) if start < stop else None


def put(out: Tensor, out_span: slice, values: Tensor, span: slice) -> None:
    """`out` holds elements `out_span` of a bucket, `values` elements `span`: what both have is copied into `out`."""
    to, source = overlap(out_span, span, out_span.start), overlap(out_span, span, span.start)
    if to is not None and source is not None:
        out[to].copy_(values[source])


def elements(axis: Axis, bucket: Bucket, part: Tensor, span: slice, device: torch.device) -> Tensor:
    """Elements `span` of a bucket of which `part` is what this rank has, all of it or its shard. On every rank: each
    sends what is in its own shard, and no more. Collective unless `part` is all."""
    out = torch.empty(span.stop - span.start, dtype=part.dtype, device=device)
    if part.numel() == bucket.numel:
        return out.copy_(part[span])
    put(out, span, part, bucket.shard(axis.index))
    pending = [
        axis.broadcast(out[both].view(torch.uint8), rank, f"part of {bucket.label}")
        for rank in range(axis.size)
        if (both := overlap(bucket.shard(rank), span, span.start))
    ]
    for one in pending:
        one.wait()
    return out
