"""Buffers that gradients are collected and reduced in, by going through a step on paper: the largest number in use at
once of each size is what a pool keeps. As `zero.reducer`, `zero.leaving` and `comm.process_axis` do it. Pure.
"""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from zero3d.comm.bucket import Bucket
from zero3d.planner.keeping import DTYPES, Keeping

IN_FLIGHT = 3
COLLECTED = 1 << 17
"""As `zero.reducer` has them."""


@dataclass
class PaperPool:
    """Sizes in bytes."""

    free: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    total: int = 0

    def take(self, nbytes: int, key: Hashable = None) -> tuple[int, Hashable]:
        kind = (nbytes, key)
        if self.free.get(kind):
            self.free[kind] -= 1
        else:
            self.total += nbytes
        return kind

    def give(self, kind: tuple[int, Hashable]) -> None:
        self.free[kind] = self.free.get(kind, 0) + 1


class PaperLane:
    """One bucket on its way to be reduced. make_up: a number of where its slots are and how large."""

    def __init__(self, bucket: Bucket, keeping: Keeping, away: bool, make_up: int) -> None:
        self.bucket = bucket
        self.width = DTYPES[bucket.dtype]
        self.wire, self.held = keeping.wire_of(self.width), keeping.held_of(self.width)
        level = keeping.effective_level
        self.leaves = away
        self.keeps = not keeping.every_turn
        plain = self.held == self.wire == 4 and self.keeps
        self.at_once = level == 0 and plain and keeping.group == 2 and not away
        landing = bucket.shard_numel
        self.lands_whole = landing == bucket.numel and self.wire == self.held and not away
        self.travels = self.wire if keeping.group == 1 and keeping.every_turn else self.held
        self.numel_of = {slot.name: slot.numel for slot in bucket.slots}
        self.make_up = make_up
        self.reset(first=True)

    def reset(self, *, first: bool) -> None:
        self.first = first
        self.missing = set(self.numel_of)
        self.waiting = 0
        self.buffer: tuple[int, Hashable] | None = None
        self.collecting = False
        self.landing: tuple[int, Hashable] | None = None
        self.lands: tuple[int, Hashable] | None = None


class PaperReducer:
    """Of a rank's trained `buckets`, in the model's order; rests: sums that are kept have no memory before a step's
    first gradients."""

    def __init__(
        self, buckets: Sequence[Bucket], keeping: Keeping, away: frozenset[Bucket], *, rests: bool = False
    ) -> None:
        self.pool, self.axis_pool = PaperPool(), PaperPool()
        self._keeping = keeping
        make_ups: dict[tuple[tuple[int, int], ...], int] = {}
        self._lanes = [
            PaperLane(bucket, keeping, bucket in away, make_ups.setdefault(bucket.make_up, len(make_ups)))
            for bucket in reversed(buckets)
        ]
        self._lane_of: Mapping[str, PaperLane] = {name: lane for lane in self._lanes for name in lane.numel_of}
        self._flying: deque[PaperLane] = deque()
        self._on_its_way: deque[tuple[int, Hashable]] = deque()
        self._next = 0
        self._reducing = False
        self.waiting = 0
        """Bytes of gradients that have not been collected."""
        self._asleep = {lane: lane.bucket.numel * lane.held for lane in self._lanes if rests and lane.keeps}
        self.resting = sum(self._asleep.values())
        self.woken = 0
        """Bytes of sums that have memory by now, of those that rested at the start of the step."""

    def begin(self, *, first: bool, last: bool) -> None:
        while self._flying:
            self._land_oldest()
        for lane in self._lanes:
            lane.reset(first=first)
        self._next, self.waiting = 0, 0
        self._reducing = last or self._keeping.every_turn

    def arrived(self, name: str) -> None:
        lane = self._lane_of.get(name)
        if lane is None or name not in lane.missing:
            return
        lane.missing.remove(name)
        lane.waiting += lane.numel_of[name]
        self.waiting += lane.numel_of[name] * lane.width
        if not lane.missing or lane.waiting >= COLLECTED:
            self._collect(lane)
            while self._reducing and self._next < len(self._lanes) and not self._lanes[self._next].missing:
                self._start()

    def end(self) -> None:
        for lane in self._lanes[self._next :]:
            self._collect(lane)
            if lane.missing:
                self._buffer(lane)
            if self._reducing:
                self._start()

    def finish(self) -> None:
        while self._flying:
            self._land_oldest()
        while self._on_its_way:
            self.pool.give(self._on_its_way.popleft())

    def _collect(self, lane: PaperLane) -> None:
        if lane.waiting:
            self._buffer(lane)
            self.waiting -= lane.waiting * lane.width
            lane.waiting = 0

    def _buffer(self, lane: PaperLane) -> None:
        """Where gradients are collected."""
        self.woken += self._asleep.pop(lane, 0)
        if lane.keeps or lane.collecting:
            return
        lane.collecting = True
        if lane.leaves:
            self._make_room()
        if not (lane.lands_whole and lane.first):
            lane.buffer = self.pool.take(lane.bucket.numel * lane.wire, lane.make_up)

    def _start(self) -> None:
        lane = self._lanes[self._next]
        self._buffer(lane)
        while len(self._flying) >= (1 if lane.leaves else IN_FLIGHT):
            self._land_oldest()
        size = lane.bucket.numel * lane.wire
        if lane.keeps and lane.held != lane.wire:
            lane.buffer = self.pool.take(size)
        if lane.leaves and not lane.keeps:
            same = lane.bucket.numel == lane.bucket.shard_numel and lane.wire == lane.travels
            lane.lands = None if same else self.pool.take(lane.bucket.shard_numel * lane.travels)
        if self._keeping.group > 1 and not (lane.keeps and lane.at_once):
            lane.landing = self.axis_pool.take(size)
        self._flying.append(lane)
        self._next += 1
        if lane.leaves and self._keeping.group == 1:
            self._land_oldest()

    def _land_oldest(self) -> None:
        lane = self._flying.popleft()
        if lane.landing is not None:
            self.axis_pool.give(lane.landing)
        if lane.leaves and not lane.keeps:
            if lane.lands is not None:
                self._on_its_way.append(lane.lands)
            elif lane.buffer is not None:
                self._on_its_way.append(lane.buffer)
                lane.buffer = None
        if lane.buffer is not None:
            self.pool.give(lane.buffer)
            lane.buffer = None
        lane.landing = lane.lands = None

    def _make_room(self) -> None:
        while len(self._on_its_way) > 1:
            self.pool.give(self._on_its_way.popleft())
