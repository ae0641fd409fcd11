"""A shard: what the optimizer, clipping, checkpoints and offload see of a bucket, whatever level made it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zero3d.comm.bucket import Bucket, Piece
from zero3d.comm.done import DONE
from zero3d.contracts import Pending
from zero3d.mapped import address


@dataclass(eq=False, kw_only=True)
class Shard:
    """Elements `span` of a trainable bucket, held by this rank.

    master:   fp32 [n], what the optimizer updates
    gradient: [n], the sum over ranks and micro-batches, not yet divided by the number of counted targets
    weights:  [n], in the dtype that the model computes in; the same memory as `master` where that is fp32
    scaled:   what the update has multiplied `gradient` by; 1 when it was just summed
    coming:   to be waited for before `gradient` is read (level 0, where it is gathered)
    updated:  to be waited for before `master` or `weights` are read (of another home, where the update goes on while
              the next step begins)
    """

    bucket: Bucket
    span: slice
    master: Tensor
    gradient: Tensor
    weights: Tensor
    scaled: float = 1.0
    coming: Pending = DONE
    updated: Pending = DONE

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        """The parameters' parts in this shard; offsets are the shard's own."""
        return tuple(self.bucket.pieces(self.span))

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.master.device

    def narrow(self) -> None:
        """The model's weights become the master weights, rounded to their dtype."""
        if address(self.weights) != address(self.master):
            self.weights.copy_(self.master)

    def settle(self) -> None:
        """Waits until `master` and `weights` are what the last update makes them."""
        self.updated.wait()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of what it holds beside the weights."""
        yield ("weights" if address(self.weights) == address(self.master) else "optimizer"), self.master
        yield "gradients", self.gradient
