"""An axis over a torch.distributed process group: the one place that knows its calls and their names.

Reductions are exchanges followed by a local sum, on every back end: half the bytes of gloo's own reduce-scatter,
a fixed order (by rank), and a sum in fp32 whatever travels. gloo exchanges by posted sends and receives, which
need no thread of their own and are matched by what they carry, so that two ranks that disagree about what comes
next never add the wrong buffers; other back ends by their all-to-all and all-gather.
"""

import atexit
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from zero3d.comm.flat import Pool
from zero3d.comm.lookout import Leg, Lookout, Meeting
from zero3d.comm.posted import Posted

CHUNK = 1 << 17
"""Elements summed at a time: parts and sum stay in a core's cache."""
LARGE = 1 << 19
"""Bytes from which an all-reduce over more than two ranks sends so much less in two exchanges that it ends sooner."""
BOARD_TIMEOUT = timedelta(seconds=2)

_lookouts: WeakKeyDictionary[dist.ProcessGroup, Lookout] = WeakKeyDictionary()
_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()
"""As process groups are, a lookout is the process', whatever engines there are: a rank may wait in one engine for a
rank that waits in another."""


def lookout_of_process() -> Lookout:
    """The lookout of the open process groups; where none are open, one that never looks."""
    if not dist.is_initialized() or (world := dist.group.WORLD) is None:
        return Lookout()
    found = _lookouts.get(world)
    if found is None:
        found = _lookouts[world] = Lookout()
        try:
            # Of its own: a store's connection serves one thread at a time.
            store: Any = _get_default_store()
            board = PrefixStore("zero3d lookout", store.clone())
            board.set_timeout(BOARD_TIMEOUT)
        except (RuntimeError, AttributeError):
            return found  # A store that cannot be had twice: waits end with the process group's time-out alone.
        found.start(board, dist.get_rank(), dist.get_world_size(), _meet)
        atexit.register(found.finish)
    return found


class ProcessAxis:
    """An `Axis` over `group`, whose ranks in order are the axis' indices."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self.size = dist.get_world_size(group)
        self.index = dist.get_rank(group)
        self._pool = Pool(device)
        self._scratch = torch.empty(CHUNK, dtype=torch.float32, device=device)
        self._posts = dist.get_backend(group) == "gloo"
        self._name = _name_of(group)
        self._lookout = lookout_of_process()
        self.one_call_sums = self.size == 2

    def held(self) -> Sequence[Tensor]:
        return [*self._pool, self._scratch]

    def all_gather(self, out: Tensor, part: Tensor, label: str) -> Posted:
        return self._gather(out, part, self._meeting("all-gather", label))

    def reduce_scatter(self, out: Tensor, whole: Tensor, label: str, *, add: bool = False) -> Posted:
        landing = self._pool.take(whole.numel(), whole.dtype)
        rows, legs, meeting = self._scatter(whole, landing, "reduce-scatter", label)

        def land() -> None:
            _sum(out, rows, self._scratch, add=add)
            self._pool.give(landing)

        return Posted(self._lookout, meeting, legs, land)

    def all_reduce(self, tensor: Tensor, label: str) -> Posted:
        floats = tensor.is_floating_point()
        if (self.one_call_sums and tensor.dtype == torch.float32) or not (floats or self._posts):
            meeting = self._meeting("all-reduce", label)
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
            peer = self._ranks[1 - self.index] if self._posts else -1
            legs = [Leg(work, "both", peer, tensor)]
            return Posted(self._lookout, meeting, legs, _nothing)
        if floats and self.size > 2 and tensor.nbytes >= LARGE and tensor.numel() % self.size == 0:
            return self._reduce_in_halves(tensor, label)
        everyone = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        meeting = self._meeting("all-reduce", label)
        gathered = self._gather(everyone, tensor, meeting)

        def add_up() -> None:
            gathered.wait()
            rows = everyone.view(self.size, -1)
            if floats:
                _sum(tensor, list(rows), self._scratch, add=False)
            else:
                tensor.copy_(rows.sum(dim=0))

        return Posted(self._lookout, meeting, [], add_up)

    def _reduce_in_halves(self, tensor: Tensor, label: str) -> Posted:
        """Each rank sums one part and tells the others: 2 / size of what gathering all of it would send."""
        part, landing = tensor.view(self.size, -1)[self.index], torch.empty_like(tensor)
        rows, legs, meeting = self._scatter(tensor, landing, "all-reduce", label)

        def spread() -> None:
            _sum(part, rows, self._scratch, add=False)
            self.all_gather(tensor, part, f"sums of {label}").wait()

        return Posted(self._lookout, meeting, legs, spread)

    def broadcast(self, tensor: Tensor, root: int, label: str) -> Posted:
        meeting = self._meeting("broadcast", label)
        if not self._posts:
            work = dist.broadcast(tensor, self._ranks[root], group=self._group, async_op=True)
            legs = [Leg(work, "", -1, tensor)]
        elif self.index == root:
            legs = [self._leave(tensor, rank, meeting.tag) for rank in self._others()]
        else:
            legs = [self._arrive(tensor, root, meeting.tag)]
        return Posted(self._lookout, meeting, legs, _nothing)

    def send(self, tensor: Tensor, to: int, label: str) -> Posted:
        meeting = self._meeting("send", label, self.index, to)
        return Posted(self._lookout, meeting, [self._leave(tensor, to, meeting.tag)], _nothing)

    def recv(self, tensor: Tensor, source: int, label: str) -> Posted:
        meeting = self._meeting("receive", label, source, self.index)
        return Posted(self._lookout, meeting, [self._arrive(tensor, source, meeting.tag)], _nothing)

    def _scatter(
        self, whole: Tensor, landing: Tensor, verb: str, label: str
    ) -> tuple[list[Tensor], list[Leg], Meeting]:
        """Starts to send every rank its part of `whole`. -> where each rank's part for me will be; what brings them."""
        meeting = self._meeting(verb, label)
        parts, rows = list(whole.view(self.size, -1)), list(landing.view(self.size, -1))
        if self._posts:
            legs = self._exchange(parts, rows, meeting.tag)
            rows[self.index] = parts[self.index]
        else:
            legs = [Leg(dist.all_to_all_single(landing, whole, group=self._group, async_op=True), "", -1, landing)]
        return rows, legs, meeting

    def _gather(self, out: Tensor, part: Tensor, meeting: Meeting) -> Posted:
        mine = out.view(self.size, -1)[self.index]
        if mine.data_ptr() != part.data_ptr():
            mine.copy_(part)
        if self._posts:
            legs = self._exchange([mine] * self.size, list(out.view(self.size, -1)), meeting.tag)
        else:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            legs = [Leg(gather(out, mine, group=self._group, async_op=True), "", -1, out)]
        return Posted(self._lookout, meeting, legs, _nothing)

    def _meeting(self, verb: str, label: str, source: int = -1, to: int = -1) -> Meeting:
        """What errors call it, and what tells the same calls of other ranks from others."""
        if source < 0:
            call = f"{verb} {label}"
            return self._lookout.meeting(f"{verb} of {label}", self._name, call, call, _tag(verb, label))
        way = f"{label} {source}>{to}"
        peer = f"to rank {self._ranks[to]}" if verb == "send" else f"from rank {self._ranks[source]}"
        mate = "receive" if verb == "send" else "send"
        what = f"{verb} of {label} {peer}"
        return self._lookout.meeting(what, self._name, f"{verb} {way}", f"{mate} {way}", _tag("send", label))

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> list[Leg]:
        """Row r of `outgoing` goes to rank r, whose row for me arrives in row r of `incoming`."""
        others = self._others()
        arriving = [self._arrive(incoming[rank], rank, tag) for rank in others]
        leaving = [self._leave(outgoing[rank], rank, tag) for rank in others]
        return [*arriving, *leaving]

    def _arrive(self, tensor: Tensor, source: int, tag: int) -> Leg:
        rank = self._ranks[source]
        return Leg(dist.irecv(tensor, rank, group=self._group, tag=tag), "in", rank, tensor)

    def _leave(self, tensor: Tensor, to: int, tag: int) -> Leg:
        rank = self._ranks[to]
        return Leg(dist.isend(tensor, rank, group=self._group, tag=tag), "out", rank, tensor)

    def _others(self) -> list[int]:
        return [(self.index + step) % self.size for step in range(1, self.size)]


def _sum(out: Tensor, rows: Sequence[Tensor], scratch: Tensor, *, add: bool) -> None:
    """The sum of `rows` in their order, in fp32, into or onto `out`, which may be one of them."""
    if len(rows) == 2 and not add and {out.dtype, rows[0].dtype} == {torch.float32}:
        torch.add(rows[0], rows[1], out=out)
        return
    for start in range(0, out.numel(), CHUNK):
        part = slice(start, min(start + CHUNK, out.numel()))
        total = scratch[: part.stop - part.start]
        total.copy_(rows[0][part])
        for row in rows[1:]:
            total.add_(row[part])
        if add:
            out[part].add_(total)
        else:
            out[part].copy_(total)


def _name_of(group: dist.ProcessGroup) -> str:
    """The same on all of its ranks and on no others."""
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    name = f"{group.group_name} {zlib.crc32(ranks.encode())}"
    _groups[name] = group
    return name


def _meet(name: str, way: str, peer: int, tag: int, num_bytes: int) -> object:
    """What ends a peer's wait, as the other side would have: zeros sent or received. -> what must live until then."""
    group = _groups[name]
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    if way == "in":
        return data, dist.isend(data, peer, group=group, tag=tag)
    if way == "out":
        return data, dist.irecv(data, peer, group=group, tag=tag)
    data = data.view(torch.float32)
    return data, dist.all_reduce(data, group=group, async_op=True)


def _tag(verb: str, label: str) -> int:
    return zlib.crc32(f"{verb} {label}".encode()) & 0x7FFFFFFF


def _nothing() -> None:
    return None
