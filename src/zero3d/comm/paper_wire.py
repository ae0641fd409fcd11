"""A wire between ranks that nobody has started: a rehearsal of one of them needs no others.

What has no data needs none. Of the small tensors that do, such as counts, every other rank says what this one says.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero3d.comm.lookout import Leg
from zero3d.computed import is_fake


class PaperWire:
    """The `Wire` of index `index` of `size`. posts: as a back end's that does, such as gloo."""

    def __init__(self, size: int, index: int, name: str, *, posts: bool = True) -> None:
        self.size = size
        self.index = index
        self.ranks: Sequence[int] = range(size)
        self.posts = posts
        self.name = name

    def arrive(self, tensor: Tensor, source: int, tag: int) -> Leg:
        return _over(tensor)

    def leave(self, tensor: Tensor, to: int, tag: int) -> Leg:
        return _over(tensor)

    def spread(self, mine: Tensor, rows: Tensor, tag: int) -> list[Leg]:
        if not is_fake(mine):
            rows.copy_(mine.expand_as(rows))
        return []

    def trade(self, parts: Tensor, rows: Tensor, tag: int) -> list[Leg]:
        return self.spread(parts[self.index], rows, tag)

    def all_to_all(self, out: Tensor, whole: Tensor) -> Leg:
        self.trade(whole.view(self.size, -1), out.view(self.size, -1), 0)
        return _over(out)

    def all_gather(self, out: Tensor, part: Tensor) -> Leg:
        self.spread(part, out.view(self.size, -1), 0)
        return _over(out)

    def all_reduce(self, tensor: Tensor) -> Leg:
        if not is_fake(tensor):
            tensor.mul_(torch.tensor(self.size, dtype=tensor.dtype))
        return _over(tensor)

    def broadcast(self, tensor: Tensor, root: int) -> Leg:
        return _over(tensor)


def _over(tensor: Tensor) -> Leg:
    return Leg(None, "", -1, tensor)
