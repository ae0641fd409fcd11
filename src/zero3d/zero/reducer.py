"""Gradients as autograd makes them -> sums over ranks and micro-batches, while backward goes on.

Each trainable bucket is a lane. Its gradients are collected in one flat buffer; when all are there the buffer is
reduce-scattered. Lanes start strictly in one order, the same on every rank, whatever order the gradients come in:
the reverse of the model's. What a rank did not compute counts as zero.

    once a step         micro-batches are added in the lane's own buffer, reduced in the last turn
    once a micro-batch  the buffer is lent by a pool, reduced in every turn and added to the shard

Both are one code path: they differ in whose buffer collects, and in whether the landed sum replaces or adds.
A backward that comes after the last turn has been reduced (in a loop of the user's own, who need not say which one is
the last) begins a sum of its own, to which what was reduced before is added once it has landed.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from zero3d.comm.bucket import Bucket
from zero3d.comm.flat import Pool
from zero3d.contracts import Axis, Pending
from zero3d.errors import DivergedError
from zero3d.exact import group_norms

IN_FLIGHT = 3
"""Reductions under way at once; the next one waits for the oldest, which bounds the memory they use."""


class Lane:
    """One bucket on its way to be reduced.

    kept:     [numel], sums of micro-batches, or None where each micro-batch is reduced by itself
    landing:  [numel / dp], receives my part of the sum over ranks
    spread:   [numel], whose part `landing` is, to be gathered at the end (level 0), or None
    at_once:  `kept`, whose part `landing` is, receives the whole sum (level 0 where the axis has one call for it)
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        kept: Tensor | None,
        landing: Tensor,
        spread: Tensor | None,
        at_once: bool,
        wire: torch.dtype,
        pool: Pool,
    ) -> None:
        self.bucket = bucket
        self.landing = landing
        self.spread = spread
        self.fires = [0] * len(bucket.slots)
        self.arrivals = [0] * len(bucket.slots)
        self.started = False
        self.norms: Tensor | None = None
        self.kept = kept
        self.wire = wire
        self._at_once = at_once
        self._pool = pool
        self._expected = [1] * len(bucket.slots)
        self._missing = len(bucket.slots)
        self._sizes = _sizes(bucket)
        self._buffer: Tensor | None = None
        self._parts: Sequence[Tensor] = kept.split(self._sizes) if kept is not None else ()
        self._first = True
        self._reduced = False
        self._before: Tensor | None = None

    def begin(self, first: bool) -> None:
        again = self._reduced and not first
        self._before = self._total.clone() if again else None
        self._first = first or again
        self._reduced = False
        self.started = False
        self.fires = [0] * len(self.fires)
        self._missing = len(self.fires)
        if first:
            self.arrivals = [0] * len(self.arrivals)

    @property
    def complete(self) -> bool:
        return not self._missing

    def add(self, index: int, gradient: Tensor | None) -> None:
        """A gradient of parameter `index`; a second one in the same turn adds to the first. None: it came, and is
        left out."""
        if self.started:
            raise DivergedError(
                f"a gradient of {self.bucket.slots[index].name} came after its reduction had started",
                hint="A parameter gave more gradients in one backward than before (reentrant checkpointing of a "
                "reused module?). Set zero.overlap = false.",
            )
        part = self._collecting(index)
        adds = bool(self.fires[index]) or (self.kept is not None and not self._first)
        if gradient is not None:
            part.add_(gradient) if adds else part.copy_(gradient)
            self.arrivals[index] += 1
        elif not adds:
            part.zero_()
        self.fires[index] += 1
        self._missing -= self.fires[index] == self._expected[index]

    def forget(self, names: Collection[str]) -> None:
        """The sums of micro-batches of these parameters begin anew."""
        for index, slot in enumerate(self.bucket.slots):
            if self.kept is not None and slot.name in names:
                self._collecting(index).zero_()

    def close(self) -> None:
        """What did not arrive is zero."""
        for index, fires in enumerate(self.fires):
            if not fires and (self.kept is None or self._first):
                self._collecting(index).zero_()
        self._expected = [max(fires, before) for fires, before in zip(self.fires, self._expected)]

    def start(self, axis: Axis) -> Pending:
        """Sends what was collected; once waited for, `landing` holds the sum, added to the turns before."""
        self.started = True
        label = self.bucket.label
        if self.kept is not None and self._at_once:
            return axis.all_reduce(self.kept, label)
        if self.kept is not None and self.kept.dtype == self.wire:
            return axis.reduce_scatter(self.landing, self.kept, label)
        if self.kept is not None:
            self._buffer = self._pool.take(self.bucket.numel, self.wire)
            self._buffer.copy_(self.kept)
        assert self._buffer is not None
        return axis.reduce_scatter(self.landing, self._buffer, label, add=self.kept is None and not self._first)

    def landed(self, *, final: bool) -> None:
        """The buffer is free again. `final`: the sum is whole; its norms are taken while others are on their way."""
        if self._before is not None:
            self._total.add_(self._before)
            self._before = None
        self._reduced = final and self.kept is not None
        if final:
            self.norms = group_norms(self.landing)
        if self._buffer is not None:
            self._pool.give(self._buffer, self._key)
            self._buffer = None
            self._parts = self._parts if self.kept is not None else ()

    @property
    def _total(self) -> Tensor:
        """Where the sum over ranks lands."""
        return self.kept if self._at_once and self.kept is not None else self.landing

    @property
    def _key(self) -> object:
        """Buffers are shared by buckets of one make-up, so that the gaps between slots stay zero."""
        return None if self.kept is not None else tuple((slot.offset, slot.numel) for slot in self.bucket.slots)

    def _collecting(self, index: int) -> Tensor:
        """Where a parameter's gradient is collected."""
        if not self._parts:
            self._buffer = self._pool.take(self.bucket.numel, self.wire, self._key)
            self._parts = self._buffer.split(self._sizes)
        return self._parts[2 * index]


def _sizes(bucket: Bucket) -> list[int]:
    """Of each slot and of the gap behind it."""
    ends = [slot.offset for slot in bucket.slots[1:]] + [bucket.numel]
    return [size for slot, end in zip(bucket.slots, ends) for size in (slot.numel, end - slot.offset - slot.numel)]


class Reducer:
    """Runs the lanes (given in the order in which they start) over the turns of a step."""

    def __init__(self, axis: Axis, lanes: Sequence[Lane], *, every_turn: bool, overlap: bool) -> None:
        self._axis = axis
        self._lanes = lanes
        self._every_turn = every_turn
        self._overlap = overlap
        self._flying: deque[tuple[Lane, Pending]] = deque()
        self._spreading: dict[Lane, Pending] = {}
        self._next = 0
        self._reducing = False
        self._last = False
        self._counts = True
        self._tasks: set[int] = set()

    def begin(self, first: bool, last: bool, *, counts: bool = True) -> None:
        # What lands here belongs to the turn before, so `_last` is set after it.
        for gathered in self.finish().values():
            gathered.wait()
        self._spreading.clear()
        for lane in self._lanes:
            lane.begin(first)
        self._next = 0
        self._last = last
        self._counts = counts
        self._reducing = last or self._every_turn
        self._tasks = set()

    def arrived(self, lane: Lane, index: int, gradient: Tensor) -> None:
        """Called by autograd. In a backward inside a backward (reentrant checkpointing) one parameter may come
        again later, so nothing starts before the end."""
        lane.add(index, gradient if self._counts else None)
        self._tasks.add(torch._C._current_graph_task_id())
        if self._reducing and self._overlap and len(self._tasks) == 1:
            self._start_complete()

    def end(self) -> None:
        for lane in self._lanes:
            if not lane.started:
                lane.close()
        if self._reducing:
            while self._next < len(self._lanes):
                self._start(self._lanes[self._next])
        if not self._overlap:
            self.finish()

    def finish(self) -> Mapping[Lane, Pending]:
        """Every sum has landed; what comes back is the gathers (level 0) that still go on."""
        while self._flying:
            self._land_oldest()
        return self._spreading

    def _start_complete(self) -> None:
        while self._next < len(self._lanes) and self._lanes[self._next].complete:
            self._lanes[self._next].close()
            self._start(self._lanes[self._next])

    def _start(self, lane: Lane) -> None:
        while len(self._flying) >= IN_FLIGHT:
            self._land_oldest()
        self._flying.append((lane, lane.start(self._axis)))
        self._next += 1

    def _land_oldest(self) -> None:
        lane, pending = self._flying.popleft()
        pending.wait()
        lane.landed(final=self._last)
        if self._last and lane.spread is not None:
            label = f"gradient of {lane.bucket.label}"
            self._spreading[lane] = self._axis.all_gather(lane.spread, lane.landing, label)
