"""Parameters that several tensor-parallel ranks hold alike while each computes a part of the gradient's sum: norms that
run on a part of the sequence, KV heads that are fewer than ranks.

Once a step, when all micro-batches and the ranks of dp are added, the parts are: one exchange for all of them.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zero3d.contracts import Axis
from zero3d.zero.shard import Shard


class Partial:
    """`holders`: name of the parameter -> the ranks of `axis` that hold the same as this one."""

    def __init__(self, axis: Axis, holders: Mapping[str, range], shards: Sequence[Shard]) -> None:
        self._axis = axis
        found = [(shard, piece) for shard in shards for piece in shard.pieces if piece.name in holders]
        self._pieces = [(shard, slice(piece.start, piece.stop), holders[piece.name]) for shard, piece in found]

    def add_up(self) -> list[Shard]:
        """Gradients become the sums over those that hold the same. -> shards that have changed. Collective."""
        for everywhere in (True, False):
            chosen = [one for one in self._pieces if (len(one[2]) == self._axis.size) is everywhere]
            if not chosen:
                continue
            for shard, _, _ in chosen:
                shard.coming.wait()
            mine = torch.cat([shard.gradient[span].to(shard.device) for shard, span, _ in chosen])
            total = self._everyones(mine) if everywhere else self._holders(mine, chosen)
            at = 0
            for shard, span, _ in chosen:
                part = shard.gradient[span]
                part.copy_(total[at : at + part.numel()])
                at += part.numel()
        return list(dict.fromkeys(shard for shard, _, _ in self._pieces))

    def _everyones(self, mine: Tensor) -> Tensor:
        self._axis.all_reduce(mine, "gradients of parameters held alike").wait()
        return mine

    def _holders(self, mine: Tensor, chosen: Sequence[tuple[Shard, slice, range]]) -> Tensor:
        every = mine.new_empty(self._axis.size, mine.numel())
        self._axis.all_gather(every.view(-1), mine, "gradients of parameters held by several").wait()
        return torch.cat(list(_sums(every, chosen)))


def _sums(every: Tensor, chosen: Sequence[tuple[Shard, slice, range]]) -> Iterator[Tensor]:
    at = 0
    for _, span, holders in chosen:
        numel = span.stop - span.start
        rows = every[holders.start : holders.stop, at : at + numel]
        yield rows.sum(dim=0, dtype=torch.float32).to(every.dtype)
        at += numel
