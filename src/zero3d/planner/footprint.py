"""What a rank holds at the peak of a step, by kind: from a workload, a layout and the rank's place on pp. Pure.

lasting     weights, gradients, optimizer: of the rank's buckets (`states`); buffers: pools of gathers and reductions
            (`standing`), and of each axis
passing     activations of the micro-batches that are live, and what the part that runs holds beside (`Course`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zero3d.offload.budget import HostNeed
from zero3d.pipeline.action import Action, Kind
from zero3d.planner.keeping import DTYPES, Keeping, Place
from zero3d.planner.standing import Standing, Waiting, courses_of, standing_of
from zero3d.planner.workload import Amount, Workload

UPDATE_SCRATCH = (4 << 16) + 1088
"""Of a thread of the update on the host: `offload.adamw.CHUNK` numbers, and what keeps threads apart."""
SMALL, GROUP, NORM = 1 << 16, 64, 17
"""Sums of fewer elements are put together for their norms, one of each group, which takes so many bytes meanwhile."""
TOGETHER, AGREED = 1 << 21, 28
"""Norms that are added up at a time, and bytes that each takes then."""
SCRATCH = 4 << 17
"""Bytes in which an axis adds up: `comm.process_axis.CHUNK` numbers."""
GIVEN = 2
"""Tensors of what crosses that a stage keeps of each of its blocks."""
UPDATE = "the update"
KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one rank at the peak of a step. at: the action; live: micro-batches in each of its stages, added up."""

    by_kind: Mapping[str, int]
    at: str
    live: int
    host: HostNeed | None = None
    kinds_elsewhere: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """On the device."""
        return sum(self.by_kind.values())

    @property
    def host_bytes(self) -> int:
        return self.kinds_elsewhere.get("host", 0) + self.kinds_elsewhere.get("staging", 0)


def footprint(workload: Workload, keeping: Keeping, index: int = 0, *, micro_batches: int | None = None) -> Footprint:
    """Of a rank that is number `index` on pp; micro_batches: that are gone through, where fewer reach the peak."""
    number = keeping.micro_batches if micro_batches is None else micro_batches
    any_size = replace(keeping, micro_batch=min(keeping.micro_batch, 2), micro_batches=number)
    standing = standing_of(workload, any_size, index)
    kept = standing.kept
    peak, at, live, woken = _Way(workload, keeping, standing).walk()
    kept_buffers = standing.pools + kept.counters + sum(place.part.buffers for place in standing.places)
    kept_buffers += int(workload.tp_buffers().of(keeping.micro_batch)) if workload.tp > 1 else 0
    kept_buffers += UPDATE_SCRATCH * keeping.threads if keeping.offloads else 0
    kept_buffers += SCRATCH * ((keeping.group > 1) + (keeping.pp > 1))
    by_kind = {
        "weights": kept.weights,
        "gradients": kept.gradients - standing.resting + woken,
        "optimizer": kept.optimizer,
        "activations": int(peak) if at != UPDATE else 0,
        "buffers": kept_buffers + (int(peak) if at == UPDATE else 0),
    }
    return Footprint(
        by_kind=by_kind,
        at=at,
        live=live,
        host=kept.host,
        kinds_elsewhere={} if kept.host is None else kept.host.held,
    )


class _Way:
    """Through a step's actions."""

    def __init__(self, workload: Workload, keeping: Keeping, standing: Standing) -> None:
        self._workload, self._keeping, self._standing = workload, keeping, standing
        self._at_stage = standing.at_stage
        self._forwards: dict[int, tuple[float, float]] = {}
        self._backwards: dict[tuple[Kind, int, int], tuple[float, int]] = {}
        self._last = keeping.stages - 1
        self._samples = keeping.micro_batch
        self._crossing = int(workload.blocks[0].leaving.of(self._samples)) if keeping.stages > 1 else 0

    def walk(self) -> tuple[float, str, int, int]:
        """(bytes of activations at the peak, when, live micro-batches, and of sums that rested and have memory)."""
        actions = self._standing.actions
        live: dict[tuple[int, int], float] = {}
        sent: dict[tuple[int, int], float] = {}
        peak, at, most, awake = 0.0, "", 0, 0
        everything = self._standing.resting
        for number, action in enumerate(actions):
            key = (action.stage, action.micro_batch)
            if action.kind is Kind.FORWARD:
                self._arrive(sent, action)
            coming = self._coming(actions, number)
            others = sum(live.values()) + sum(sent.values()) + coming - live.get(key, 0.0)
            if action.kind is Kind.FORWARD:
                start = self._crossing if action.stage and action.stage - 1 not in self._at_stage else 0.0
                top, net = self._forward(action.stage)
                highest, woken = others + start + top, 0
                live[key] = start + net + self._kept(action.stage)
            elif action.kind is Kind.WEIGHT:
                highest, woken = others + live.pop(key), everything
            else:
                received = self._crossing if action.stage < self._last else 0.0
                backward, woken = self._backward(action, received, self._standing.waiting[number])
                highest = others + live[key] + received + backward
                if action.kind is Kind.BACKWARD:
                    live.pop(key)
                else:
                    live[key] = self._for_weights(action.stage)
                if action.stage:
                    sent[key] = self._crossing
            most = max(most, len(live))
            if highest + woken > peak + awake:
                peak, at, awake = highest, action.full, woken
        update = self._agreeing()
        if update + everything > peak + awake:
            return update, UPDATE, most, everything
        return peak, at, most, awake

    def _agreeing(self) -> float:
        """When all gradients are there: their norms."""
        small = large = 0
        for bucket in self._standing.held.buckets:
            if bucket.trainable and bucket not in self._standing.kept.away:
                numel, width = bucket.shard_numel, self._keeping.held_of(DTYPES[bucket.dtype])
                large += 0 if numel < SMALL else numel
                small += numel if numel < SMALL else 0
        norms = (small + large) / GROUP
        together = 8 * large / GROUP + (small * width + small / GROUP * NORM if small else 0)
        return max(together, 8 * norms + AGREED * min(norms, TOGETHER))

    def _coming(self, actions: Sequence[Action], number: int) -> float:
        """Of what the next action receives, room is made before this one."""
        after = actions[number + 1] if number + 1 < len(actions) else None
        if after is None or after.kind is Kind.WEIGHT:
            return 0.0
        receives = after.stage > 0 if after.kind is Kind.FORWARD else after.stage < self._last
        return self._crossing if receives else 0.0

    def _kept(self, stage: int) -> float:
        """Of what a stage gives, which is kept until its gradient comes, what its last block's part does not count:
        that has it where blocks keep what they are given."""
        blocks = [place.part for place in self._at_stage[stage] if place.block]
        if stage == self._last or not blocks or self._keeping.recompute != "none":
            return 0.0
        return self._crossing - min(blocks[-1].entering_saved.of(self._samples), self._crossing)

    def _arrive(self, sent: dict[tuple[int, int], float], action: Action) -> None:
        """A forward that comes tells that the gradients sent before it have arrived."""
        for micro_batch in self._standing.arrived.get((action.stage, action.micro_batch), ()):
            sent.pop((action.stage, micro_batch), None)

    def _forward(self, stage: int) -> tuple[float, float]:
        """(the highest, bytes that stay)."""
        if stage in self._forwards:
            return self._forwards[stage]
        level = top = 0.0
        for place in self._at_stage[stage]:
            course = courses_of(place.part, self._keeping)[0]
            top = max(top, level + max((_highest(rise.tops, self._samples) for rise in course.rises), default=0.0))
            level += course.net.of(self._samples)
        self._forwards[stage] = top, level
        return top, level

    def _backward(self, action: Action, received: float, waiting: Waiting) -> tuple[float, int]:
        """(the highest above the start, bytes of sums that have memory then)."""
        key = (action.kind, action.stage, id(waiting))
        if key not in self._backwards:
            self._backwards[key] = self._through_backward(action, received, waiting)
        return self._backwards[key]

    def _through_backward(self, action: Action, received: float, waiting: Waiting) -> tuple[float, int]:
        level, top, awake = 0.0, 0.0, 0
        for at, place in enumerate(reversed(self._at_stage[action.stage])):
            course = courses_of(place.part, self._keeping)[1]
            for rise, (wait, woken) in zip(course.rises, waiting[place.number]):
                highest = level + wait + _highest(rise.tops, self._samples)
                if highest + woken > top + awake:
                    top, awake = highest, woken
            level += course.net.of(self._samples) + (received if at == 0 else 0.0)
            level += self._left(place) if action.kind is Kind.INPUT else 0.0
            if received and place.block:  # A stage keeps what its blocks have given until its backward is over.
                level += GIVEN * self._crossing
        return top, awake

    def _for_weights(self, stage: int) -> float:
        """What the other half of a backward leaves: of products in blocks, their inputs and the gradients of what they
        gave."""
        return sum(map(self._left, self._at_stage[stage]))

    def _left(self, place: Place) -> float:
        return place.part.for_weights.of(self._samples) if place.block else 0.0


def _highest(tops: Sequence[Amount], samples: float) -> float:
    return max(one.fixed + one.each * samples for one in tops)
