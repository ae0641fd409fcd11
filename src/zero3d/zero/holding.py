"""A bucket as this rank holds it, and what the three ways of holding weights have in common."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from zero3d.comm.bucket import Bucket
from zero3d.zero.shard import Shard
from zero3d.zero.units import Unit


@dataclass(frozen=True, eq=False, kw_only=True)
class Holding:
    """`flat` [numel] is what the parameters are views of; `part` [n] is what stays when it is released."""

    bucket: Bucket
    parameters: Sequence[tuple[str, nn.Parameter]]
    flat: Tensor
    part: Tensor


class Weights(Protocol):
    """Where a model's weights are between and during the steps. One class for each way: whole, published, gathered."""

    def adopt(
        self, bucket: Bucket, parameters: Sequence[tuple[str, nn.Parameter]], initial: Tensor, dtype: torch.dtype
    ) -> Holding:
        """Copies what is kept of `initial` [numel] in `dtype`; the parameters become views of the flat buffer."""
        ...

    def watch(self, model: nn.Module, units: Sequence[Unit]) -> None:
        """Called once, when all buckets are adopted: sees to it that weights are there when a module runs."""
        ...

    def unwatch(self) -> None:
        """Undoes `watch`: modules are plain again. Weights stay where they are."""
        ...

    def leave(self) -> None:
        """The parameters are plain again, for the caller to give them data of their own."""
        ...

    def by_use(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        """In the order in which a forward wants their weights."""
        ...

    def publish(self, shard: Shard) -> None:
        """The shard's new master weights are on their way to where they are needed."""
        ...

    def write(self, bucket: Bucket, span: slice, values: Tensor) -> None:
        """Elements `span` of the bucket become `values`, the same on every rank."""
        ...

    def end_turn(self) -> None:
        """A backward is over: nothing is kept for it any longer."""
        ...

    def end_step(self) -> None:
        """All gradients of the step are there: nothing is kept for it any longer."""
        ...

    def open(self) -> None:
        """All parameters are whole until `close`."""
        ...

    def close(self) -> None: ...

    def held(self) -> Iterable[tuple[str, Tensor]]:
        """(kind, tensor) of all that is held, "weights" or "buffers"."""
        ...


def point_at(parameters: Sequence[tuple[str, nn.Parameter]], bucket: Bucket, flat: Tensor) -> None:
    """Each parameter becomes a view of its slot, of its own shape and the buffer's dtype."""
    for slot, (_, parameter) in zip(bucket.slots, parameters):
        parameter.data = flat[slot.offset : slot.offset + slot.numel].view(parameter.shape)
