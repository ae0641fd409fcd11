"""An axis over a wire: how gathers and reductions are made of what travels, and what memory they take.

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
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from zero3d.comm.flat import Pool
from zero3d.comm.guarded import GuardedBoard
from zero3d.comm.lookout import Leg, Lookout, Meeting
from zero3d.comm.posted import Posted
from zero3d.comm.wire import GroupWire, Wire, meet
from zero3d.computed import is_fake
from zero3d.mapped import address

CHUNK = 1 << 17
"""Elements summed at a time: parts and sum stay in a core's cache."""
LARGE = 1 << 19
"""Bytes from which an all-reduce over more than two ranks sends so much less in two exchanges that it ends sooner."""
BOARD_SECONDS = 3.0
"""How long an answer of the store may take, beside steps that fill the same link."""

_lookouts: WeakKeyDictionary[dist.ProcessGroup, Lookout] = WeakKeyDictionary()
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
            board.set_timeout(timedelta(seconds=BOARD_SECONDS))
        except (RuntimeError, AttributeError):
            return found  # A store that cannot be had twice: waits end with the process group's time-out alone.
        patience = max(store.timeout.total_seconds(), BOARD_SECONDS)
        found.start(GuardedBoard(board, BOARD_SECONDS), patience, dist.get_rank(), dist.get_world_size(), meet)
        atexit.register(found.finish)
    return found


class ProcessAxis:
    """An `Axis` over a wire, or over the ranks of a process group, which in order are the axis' indices."""

    def __init__(self, wire: Wire | dist.ProcessGroup, device: torch.device) -> None:
        self._wire: Wire = GroupWire(wire) if isinstance(wire, dist.ProcessGroup) else wire
        self.size = self._wire.size
        self.index = self._wire.index
        self._pool = Pool(device)
        self._scratch = torch.empty(CHUNK, dtype=torch.float32, device=device)
        self._lookout = lookout_of_process()
        self.one_call_sums = self.size == 2

    def held(self) -> Sequence[Tensor]:
        return [*self._pool, self._scratch]

    def all_gather(self, out: Tensor, part: Tensor, label: str) -> Posted:
        return self._gather(out, part, self._meeting("all-gather", label))

    def reduce_scatter(self, out: Tensor, whole: Tensor, label: str, *, add: bool = False) -> Posted:
        landing = self._pool.take(whole.numel(), whole.dtype)
        legs, meeting = self._scatter(whole, landing, "reduce-scatter", label)

        def land() -> None:
            _sum(out, self._rows(whole, landing), self._scratch, add=add)
            self._pool.give(landing)

        return Posted(self._lookout, meeting, legs, land)

    def all_reduce(self, tensor: Tensor, label: str) -> Posted:
        floats = tensor.is_floating_point()
        if (self.one_call_sums and tensor.dtype == torch.float32) or not (floats or self._wire.posts):
            meeting = self._meeting("all-reduce", label)
            return Posted(self._lookout, meeting, [self._wire.all_reduce(tensor)], _nothing)
        if floats and self.size > 2 and tensor.nbytes >= LARGE and tensor.numel() % self.size == 0:
            return self._reduce_in_halves(tensor, label)
        everyone = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        meeting = self._meeting("all-reduce", label)
        gathered = self._gather(everyone, tensor, meeting)

        def add_up() -> None:
            gathered.wait()
            rows = everyone.view(self.size, -1)
            if floats:
                _sum(tensor, [] if is_fake(everyone) else list(rows), self._scratch, add=False)
            else:
                tensor.copy_(rows.sum(dim=0))

        return Posted(self._lookout, meeting, [], add_up)

    def _reduce_in_halves(self, tensor: Tensor, label: str) -> Posted:
        """Each rank sums one part and tells the others: 2 / size of what gathering all of it would send."""
        part, landing = tensor.view(self.size, -1)[self.index], torch.empty_like(tensor)
        legs, meeting = self._scatter(tensor, landing, "all-reduce", label)

        def spread() -> None:
            _sum(part, self._rows(tensor, landing), self._scratch, add=False)
            self.all_gather(tensor, part, f"sums of {label}").wait()

        return Posted(self._lookout, meeting, legs, spread)

    def broadcast(self, tensor: Tensor, root: int, label: str) -> Posted:
        meeting = self._meeting("broadcast", label)
        if not self._wire.posts:
            legs = [self._wire.broadcast(tensor, root)]
        elif self.index == root:
            legs = [self._wire.leave(tensor, to, meeting.tag) for to in range(self.size) if to != root]
        else:
            legs = [self._wire.arrive(tensor, root, meeting.tag)]
        return Posted(self._lookout, meeting, legs, _nothing)

    def send(self, tensor: Tensor, to: int, label: str) -> Posted:
        meeting = self._meeting("send", label, self.index, to)
        return Posted(self._lookout, meeting, [self._wire.leave(tensor, to, meeting.tag)], _nothing)

    def recv(self, tensor: Tensor, source: int, label: str) -> Posted:
        meeting = self._meeting("receive", label, source, self.index)
        return Posted(self._lookout, meeting, [self._wire.arrive(tensor, source, meeting.tag)], _nothing)

    def _scatter(self, whole: Tensor, landing: Tensor, verb: str, label: str) -> tuple[list[Leg], Meeting]:
        """Starts to send every rank its part of `whole`. -> what brings theirs for me."""
        meeting = self._meeting(verb, label)
        if self._wire.posts:
            legs = self._wire.trade(whole.view(self.size, -1), landing.view(self.size, -1), meeting.tag)
        else:
            legs = [self._wire.all_to_all(landing, whole)]
        return legs, meeting

    def _rows(self, whole: Tensor, landing: Tensor) -> list[Tensor]:
        """Where each rank's part for me is, by rank, once they have come."""
        if is_fake(landing):
            return []
        rows = list(landing.view(self.size, -1))
        if self._wire.posts:
            rows[self.index] = whole.view(self.size, -1)[self.index]
        return rows

    def _gather(self, out: Tensor, part: Tensor, meeting: Meeting) -> Posted:
        mine = out.view(self.size, -1)[self.index]
        if address(mine) != address(part):
            mine.copy_(part)
        if self._wire.posts:
            legs = self._wire.spread(mine, out.view(self.size, -1), meeting.tag)
        else:
            legs = [self._wire.all_gather(out, mine)]
        return Posted(self._lookout, meeting, legs, _nothing)

    def _meeting(self, verb: str, label: str, source: int = -1, to: int = -1) -> Meeting:
        """What errors call it, and what tells the same calls of other ranks from others."""
        if source < 0:
            call = f"{verb} {label}"
            return self._lookout.meeting(f"{verb} of {label}", self._wire.name, call, call, _tag(verb, label))
        way = f"{label} {source}>{to}"
        peer = f"to rank {self._wire.ranks[to]}" if verb == "send" else f"from rank {self._wire.ranks[source]}"
        mate = "receive" if verb == "send" else "send"
        what = f"{verb} of {label} {peer}"
        return self._lookout.meeting(what, self._wire.name, f"{verb} {way}", f"{mate} {way}", _tag("send", label))


def _sum(out: Tensor, rows: Sequence[Tensor], scratch: Tensor, *, add: bool) -> None:
    """The sum of `rows` in their order, in fp32, into or onto `out`, which may be one of them."""
    if not rows:  # Of what has no data.
        return
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


def _tag(verb: str, label: str) -> int:
    return zlib.crc32(f"{verb} {label}".encode()) & 0x7FFFFFFF


def _nothing() -> None:
    return None
