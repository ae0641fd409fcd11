"""Parameters that several stages use, such as an embedding that is the output layer too.

Each of their ranks has a copy and a part of the gradient. Once the parts of dp are added, those of pp are, in the order
of stages on every one of them: the same sums, so the same updates and the same copies.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zero3d.contracts import Axis, Pending
from zero3d.zero.shard import Shard


class Tied:
    """`ranks_of`: shared parameter -> pp indices that have it, in the order of stages. Each is alone in its bucket."""

    def __init__(self, axis: Axis, ranks_of: Mapping[str, Sequence[int]], shards: Sequence[Shard]) -> None:
        self._axis = axis
        self._shared = [
            (shard, ranks_of[shard.bucket.slots[0].name]) for shard in shards if shard.bucket.slots[0].name in ranks_of
        ]

    def add_up(self) -> list[Shard]:
        """Gradients of shared parameters become the sums over their ranks. -> those that have changed."""
        pending: list[Pending] = []
        parts: list[list[Tensor]] = []
        for shard, ranks in self._shared:
            shard.coming.wait()
            label = f"gradient of {shard.bucket.slots[0].name}, tied"
            theirs, mine = [], shard.gradient.to(shard.device, copy=True)
            for rank in ranks:
                part = mine if rank == self._axis.index else torch.empty_like(mine)
                theirs.append(part)
                if rank != self._axis.index:
                    pending.append(self._axis.recv(part, rank, label))
                    pending.append(self._axis.send(mine, rank, label))
            parts.append(theirs)
        for one in pending:
            one.wait()
        for (shard, _), theirs in zip(self._shared, parts):
            total = theirs[0].float()
            for part in theirs[1:]:
                total += part
            shard.gradient.copy_(total)
        return [shard for shard, _ in self._shared]
