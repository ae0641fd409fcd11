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
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from zero3d.comm.bucket import Bucket
from zero3d.comm.done import DONE
from zero3d.comm.flat import Pool, Resting
from zero3d.contracts import Axis, Pending
from zero3d.errors import DivergedError
from zero3d.exact import group_norms
from zero3d.mapped import address
from zero3d.zero.leaving import Leaving

SMALL = 1 << 16
"""Elements of sums whose norms are not worth a call of their own."""
COLLECTED = 1 << 17
"""Elements of small gradients that wait to be collected with one call."""
IN_FLIGHT = 3
"""Reductions under way at once; the next one waits for the oldest, which bounds the memory they use."""


class Lane:
    """One bucket on its way to be reduced.

    kept:     [numel], sums of micro-batches, or None where each micro-batch is reduced by itself
    landing:  [numel / dp], holds my part of the sum over ranks in the end
    leaving:  the way to `landing` where that is of another home
    spread:   [numel], whose part `landing` is, to be gathered at the end (level 0), or None
    at_once:  `kept`, whose part `landing` is, receives the whole sum (level 0 where the axis has one call for it)
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[nn.Parameter],
        *,
        kept: Tensor | None,
        landing: Tensor,
        spread: Tensor | None,
        at_once: bool,
        wire: torch.dtype,
        pool: Pool,
        leaving: tuple[Leaving, slice] | None = None,
    ) -> None:
        """leaving: and which part of `kept` is mine"""
        self.bucket = bucket
        self.spread = spread
        self.arrivals = [0] * len(bucket.slots)
        self.started = False
        self.norms: Tensor | None = None
        self.kept = kept
        self._resting = None if kept is None else Resting(kept)
        self.wire = wire
        self._parameters = parameters
        self._at_once = at_once
        self._pool = pool
        self._expected = [1] * len(bucket.slots)
        self._came = [0] * len(bucket.slots)
        self._collected: set[int] = set()
        self._lent: set[int] = set()
        self._waiting: list[int] = []
        self._waiting_elements = 0
        self._missing = len(bucket.slots)
        self._buffer: Tensor | None = None
        self._kept_parts = self._cut(kept) if kept is not None else None
        self._parts = self._kept_parts
        # Buffers are shared by buckets of one make-up, so that the gaps between slots stay zero.
        self._key = None if kept is not None else bucket.make_up
        # Where all of the sum lands here, the first turn's gradients are collected where it lands.
        self._lands_whole = landing.numel() == bucket.numel and landing.dtype == wire and leaving is None
        self._leaving = leaving[0] if leaving else None
        self._landing = landing
        self._kept_mine = kept[leaving[1]] if leaving and kept is not None else None
        self._lands = landing
        self._parts_of: dict[tuple[int, int], list[Tensor]] = {}
        self._first = True
        self._reduced = False
        self._before: Tensor | None = None

    def begin(self, first: bool) -> None:
        again = self._reduced and not first
        self._before = self._total.clone() if again else None
        self._first = first or again
        self._reduced = False
        self.started = False
        for index in self._waiting:  # of a backward that ended with an error
            self._parameters[index].grad = None
        self._came = [0] * len(self._came)
        self._collected.clear()
        self._lent.clear()
        self._waiting, self._waiting_elements = [], 0
        self._missing = len(self._came)
        if first:
            self.arrivals = [0] * len(self.arrivals)

    def rest(self) -> None:
        """What is kept has no memory until the next gradient comes, or somebody asks for it."""
        if self._resting is not None:
            self._resting.rest()

    def wake(self) -> None:
        if self._resting is not None:
            self._resting.wake()

    @property
    def lent(self) -> Tensor | None:
        """Whose memory `kept` has, where it has rested."""
        return None if self._resting is None else self._resting.lent

    @property
    def leaves(self) -> bool:
        return self._leaving is not None

    @property
    def landing(self) -> Tensor:
        return self._landing if self._leaving is None else self._leaving.shard.gradient

    @property
    def complete(self) -> bool:
        return not self._missing

    def arrived(self, index: int) -> bool:
        """A gradient of parameter `index` is there. -> whether it is time to `collect`."""
        if self.started:
            raise DivergedError(
                f"a gradient of {self.bucket.slots[index].name} came after its reduction had started",
                hint="A parameter gave more gradients in one backward than before (reentrant checkpointing of a "
                "reused module?). Set zero.overlap = false.",
            )
        self._came[index] += 1
        self._waiting.append(index)
        self._waiting_elements += self.bucket.slots[index].numel
        if self._came[index] == self._expected[index]:
            self._missing -= 1
        return not self._missing or self._waiting_elements >= COLLECTED

    def lend(self, index: int, dtype: torch.dtype) -> tuple[Tensor, bool] | None:
        """A `Place` for the gradient of parameter `index`; None where `dtype` is another, where it is not the first of
        a backward, or where somebody else looks at it before it is collected."""
        if self.started or self._came[index] or index in self._lent or self._is_watched(self._parameters[index]):
            return None
        place = self._collecting()[index]
        if place.dtype != dtype:
            return None
        self._lent.add(index)
        return place, self._adds

    @torch.no_grad()
    def collect(self, *, counts: bool) -> None:
        """Takes the gradients that are there: copied, or added to what came before, unless they were computed where
        they are kept. Not `counts`: they are left out."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be released, and guarded, by now
            copied: tuple[list[Tensor], list[Tensor]] = [], []
            added: tuple[list[Tensor], list[Tensor]] = [], []
            into = self._collecting() if counts and self._waiting else []
            for index in self._waiting:
                parameter = self._parameters[index]
                gradient, parameter.grad = parameter.grad, None
                if gradient is None or not counts:  # it came twice, and is one by now
                    continue
                if gradient.layout is not torch.strided:
                    gradient = gradient.to_dense()
                self.arrivals[index] += 1
                lent = index in self._lent and index not in self._collected
                if not (lent and address(gradient) == address(into[index])):
                    # Of what was lent comes the sum with those before, if it comes in another place.
                    adds = index in self._collected or (self._adds and not lent)
                    parts, gradients = added if adds else copied
                    parts.append(into[index])
                    gradients.append(gradient)
                self._collected.add(index)
            if copied[0]:
                torch._foreach_copy_(*copied)
            if added[0]:
                torch._foreach_add_(*added)
        self._waiting, self._waiting_elements = [], 0

    def forget(self, names: Collection[str]) -> None:
        """The sums of micro-batches of these parameters begin anew."""
        for index, slot in enumerate(self.bucket.slots):
            if self.kept is not None and slot.name in names:
                self._collecting()[index].zero_()

    def close(self) -> None:
        """What did not arrive is zero."""
        if len(self._collected) < len(self._came) and (self.kept is None or self._first):
            for index, part in enumerate(self._collecting()):
                if index not in self._collected:
                    part.zero_()
        if self._came != self._expected:
            self._expected = [max(came, before) for came, before in zip(self._came, self._expected)]

    def start(self, axis: Axis) -> Pending:
        """Sends what was collected; once waited for, `landing` holds the sum, added to the turns before."""
        self.started = True
        label = self.bucket.label
        if self.kept is not None and self._at_once:
            return axis.all_reduce(self.kept, label)
        if self.kept is not None and self.kept.dtype == self.wire:
            sent = self.kept
        elif self.kept is not None:
            sent = self._buffer = self._pool.take(self.bucket.numel, self.wire)
            sent.copy_(self.kept)
        else:
            assert self._buffer is not None
            sent = self._buffer
        if self._leaving is not None:
            self._lands = self._kept_mine if self._kept_mine is not None else self._leaving.place(sent)
        adds = self.kept is None and self._leaving is None and not self._first
        return axis.reduce_scatter(self._lands, sent, label, add=adds)

    def landed(self, *, final: bool) -> None:
        """The buffer is free again. `final`: the sum is whole; norms of a large one are taken while others are on their
        way."""
        if self._before is not None:
            self._total.add_(self._before)
            self._before = None
        self._reduced = final and self.kept is not None
        if self._leaving is not None:
            first = self._first or self.kept is not None
            self._leaving.leave(self._lands, self._free(self._leaving), first=first, final=final)
        elif final and self.landing.numel() >= SMALL:
            self.norms = group_norms(self.landing)
        if self._buffer is not None:
            if self._buffer is not self._lands:
                self._pool.give(self._buffer, self._key)
            self._buffer, self._parts = None, self._kept_parts

    def settle(self) -> None:
        """The sum is where it stays, and the device has no part in it any more."""
        if self._leaving is not None:
            self.norms = self._leaving.arrived()

    def _free(self, leaving: Leaving) -> Callable[[], None]:
        """What gives back the memory of what leaves."""
        if self.kept is not None:
            return _nothing
        lands, key = self._lands, self._key
        if lands is self._buffer:
            return lambda: self._pool.give(lands, key)
        return lambda: leaving.give(lands)

    @property
    def _total(self) -> Tensor:
        """Where the sum over ranks lands."""
        return self.kept if self._at_once and self.kept is not None else self.landing

    @property
    def _adds(self) -> bool:
        """Whether gradients are added to those of micro-batches before."""
        return self.kept is not None and not self._first

    @staticmethod
    def _is_watched(parameter: nn.Parameter) -> bool:
        """Whether the user has hooks of gradients, beside the one that collects."""
        with torch._C.DisableTorchFunctionSubclass():
            return bool(parameter._backward_hooks) or len(parameter._post_accumulate_grad_hooks or ()) > 1

    def _collecting(self) -> list[Tensor]:
        """Where the parameters' gradients are collected."""
        self.wake()
        if self._parts is None:
            in_place = self._lands_whole and self._first
            if self._leaving is not None:
                self._leaving.make_room()
            self._buffer = self.landing if in_place else self._pool.take(self.bucket.numel, self.wire, self._key)
            key = address(self._buffer)  # the pool's few buffers come again and again
            self._parts = self._parts_of.get(key) or self._parts_of.setdefault(key, self._cut(self._buffer))
        return self._parts

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """The slots of `flat`, each in its parameter's shape."""
        with torch._C.DisableTorchFunctionSubclass():
            return [
                flat[slot.offset : slot.offset + slot.numel].view(parameter.shape)
                for slot, parameter in zip(self.bucket.slots, self._parameters)
            ]


class Reducer:
    """Runs the lanes (given in the order in which they start) over the turns of a step; of those that leave, one is
    reduced at a time, as the device's memory is what they spare."""

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

    def place(self, lane: Lane, index: int, dtype: torch.dtype) -> tuple[Tensor, bool] | None:
        """A `Place` for the gradient of a lane's parameter `index`."""
        return lane.lend(index, dtype) if self._counts else None

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

    def arrived(self, lane: Lane, index: int) -> None:
        """Called by autograd. In a backward inside a backward (reentrant checkpointing) one parameter may come
        again later, so nothing starts before the end."""
        if lane.arrived(index):
            lane.collect(counts=self._counts)
            self._tasks.add(torch._C._current_graph_task_id())
            if self._reducing and self._overlap and len(self._tasks) == 1:
                self._start_complete()

    def end(self) -> None:
        for lane in self._lanes[self._next :]:  # One at a time: buffers of those before come free meanwhile.
            lane.collect(counts=self._counts)
            lane.close()
            if self._reducing:
                self._start(lane)
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
        while len(self._flying) >= (1 if lane.leaves else IN_FLIGHT):
            self._land_oldest()
        pending = lane.start(self._axis)
        self._flying.append((lane, pending))
        self._next += 1
        if lane.leaves and pending is DONE:
            self._land_oldest()  # What waits for nobody leaves at once: the next one's would be a third buffer.

    def _land_oldest(self) -> None:
        lane, pending = self._flying.popleft()
        pending.wait()
        lane.landed(final=self._last)
        if not self._overlap:
            lane.settle()
        if self._last and lane.spread is not None:
            label = f"gradient of {lane.bucket.label}"
            self._spreading[lane] = self._axis.all_gather(lane.spread, lane.landing, label)


def _nothing() -> None:
    return None
