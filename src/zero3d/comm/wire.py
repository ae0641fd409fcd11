"""What an axis' calls travel over: the ranks of a torch.distributed process group.

The one place that knows torch's calls and their names.
"""

import zlib
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zero3d.comm.lookout import Leg

_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()
"""As process groups are, these names are the process', whatever engines there are."""


class Wire(Protocol):
    """Moves what is whole; adds nothing, but where the back end has one call that does.

    ranks: of the axis' indices, in the whole run; posts: sends and receives are matched by their tags, and cost no
    more than a collective call; name: the same on all ranks of the axis, and on no others
    """

    size: int
    index: int
    ranks: Sequence[int]
    posts: bool
    name: str

    def arrive(self, tensor: Tensor, source: int, tag: int) -> Leg:
        """What index `source` leaves for me under `tag` will be in `tensor`."""
        ...

    def leave(self, tensor: Tensor, to: int, tag: int) -> Leg: ...

    def spread(self, mine: Tensor, rows: Tensor, tag: int) -> list[Leg]:
        """`mine` goes to all others, whose own arrive in `rows` [size, n], by index; my row stays as it is."""
        ...

    def trade(self, parts: Tensor, rows: Tensor, tag: int) -> list[Leg]:
        """Row r of `parts` goes to index r, whose row for me arrives in row r of `rows`; my row stays as it is."""
        ...

    def all_to_all(self, out: Tensor, whole: Tensor) -> Leg:
        """`trade` as one call, of my own row too."""
        ...

    def all_gather(self, out: Tensor, part: Tensor) -> Leg: ...

    def all_reduce(self, tensor: Tensor) -> Leg: ...

    def broadcast(self, tensor: Tensor, root: int) -> Leg: ...


class GroupWire:
    """The `Wire` between the ranks of `group`, which in order are the axis' indices."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.size = dist.get_world_size(group)
        self.index = dist.get_rank(group)
        self.posts = dist.get_backend(group) == "gloo"
        self.name = _name_of(group)

    def arrive(self, tensor: Tensor, source: int, tag: int) -> Leg:
        rank = self.ranks[source]
        return Leg(dist.irecv(tensor, rank, group=self._group, tag=tag), "in", rank, tensor)

    def leave(self, tensor: Tensor, to: int, tag: int) -> Leg:
        rank = self.ranks[to]
        return Leg(dist.isend(tensor, rank, group=self._group, tag=tag), "out", rank, tensor)

    def spread(self, mine: Tensor, rows: Tensor, tag: int) -> list[Leg]:
        return self._exchange([mine] * self.size, rows.unbind(), tag)

    def trade(self, parts: Tensor, rows: Tensor, tag: int) -> list[Leg]:
        return self._exchange(parts.unbind(), rows.unbind(), tag)

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> list[Leg]:
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        arriving = [self.arrive(incoming[rank], rank, tag) for rank in others]
        leaving = [self.leave(outgoing[rank], rank, tag) for rank in others]
        return [*arriving, *leaving]

    def all_to_all(self, out: Tensor, whole: Tensor) -> Leg:
        return Leg(dist.all_to_all_single(out, whole, group=self._group, async_op=True), "", -1, out)

    def all_gather(self, out: Tensor, part: Tensor) -> Leg:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return Leg(gather(out, part, group=self._group, async_op=True), "", -1, out)

    def all_reduce(self, tensor: Tensor) -> Leg:
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return Leg(work, "both", self.ranks[1 - self.index] if self.posts else -1, tensor)

    def broadcast(self, tensor: Tensor, root: int) -> Leg:
        return Leg(dist.broadcast(tensor, self.ranks[root], group=self._group, async_op=True), "", -1, tensor)


def meet(name: str, way: str, peer: int, tag: int, num_bytes: int) -> object:
    """What ends a peer's wait, as the other side would have: zeros sent or received. -> what must live until then."""
    group = _groups[name]
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    if way == "in":
        return data, dist.isend(data, peer, group=group, tag=tag)
    if way == "out":
        return data, dist.irecv(data, peer, group=group, tag=tag)
    data = data.view(torch.float32)
    return data, dist.all_reduce(data, group=group, async_op=True)


def _name_of(group: dist.ProcessGroup) -> str:
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    name = f"{group.group_name} {zlib.crc32(ranks.encode())}"
    _groups[name] = group
    return name
