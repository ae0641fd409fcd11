"""What a rank holds at the peak of a step, by kind: from a workload, a layout and the rank's place on pp. Pure.

lasting     weights, gradients, optimizer: of the rank's buckets (`states`); buffers: pools of gathers and reductions
            (`gathering`, `reducing`), and of each axis
passing     activations of the micro-batches that are live, and what the part that runs holds beside (`Course`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zero3d.offload.budget import HostNeed
from zero3d.pipeline.action import Action, Kind
from zero3d.pipeline.schedules.own import find
from zero3d.planner.gathering import PaperWindows
from zero3d.planner.keeping import DTYPES, Keeping, Place, places
from zero3d.planner.reducing import PaperReducer
from zero3d.planner.run import Run
from zero3d.planner.speed import BYTES
from zero3d.planner.states import Held, Lasting, held_by, lasting
from zero3d.planner.timing import stage_blocks
from zero3d.planner.workload import Amount, Course, Workload

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
    actions = rank_actions(keeping, number, index)
    stages = sorted({action.stage for action in actions})
    run = Run(pp=keeping.pp, stages_per_rank=keeping.stages_per_rank, stage_blocks=keeping.stage_blocks)
    at_stage = places(workload, list(stage_blocks(workload, run)), stages)
    mine = [place for stage in stages for place in at_stage[stage]]
    held = held_by(workload, keeping, mine)
    kept = lasting(keeping, held)
    way = _Way(workload, keeping, at_stage, held, kept)
    peak, at, live = way.walk(actions)
    kept_buffers = way.pools + kept.counters + sum(place.part.buffers for place in mine)
    kept_buffers += int(workload.tp_buffers.of(keeping.micro_batch)) if workload.tp > 1 else 0
    kept_buffers += UPDATE_SCRATCH * keeping.threads if keeping.offloads else 0
    kept_buffers += SCRATCH * ((keeping.group > 1) + (keeping.pp > 1))
    by_kind = {
        "weights": kept.weights,
        "gradients": kept.gradients,
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


def rank_actions(keeping: Keeping, micro_batches: int, index: int) -> Sequence[Action]:
    """Of a rank of the pipeline, or of the only one."""
    schedule = keeping.schedule if keeping.stages > 1 else "accumulate"
    return find(schedule).actions(keeping.stages, keeping.pp, micro_batches)[index]


class _Way:
    """Through a step's actions."""

    def __init__(
        self, workload: Workload, keeping: Keeping, at_stage: Mapping[int, list[Place]], held: Held, kept: Lasting
    ) -> None:
        self._workload, self._keeping, self._at_stage, self._held = workload, keeping, at_stage, held
        self._kept = kept
        self._waiting: dict[int, dict[int, list[int]]] = {}
        self._turns = 0
        self._forwards: dict[int, tuple[float, float]] = {}
        self._last = keeping.stages - 1
        self._samples = keeping.micro_batch
        trained = [bucket for bucket in held.buckets if bucket.trainable]
        self._reducer = PaperReducer(trained, keeping, kept.away)
        self._crossing = int(workload.blocks[0].leaving.of(self._samples)) if keeping.stages > 1 else 0

    @property
    def pools(self) -> int:
        """Bytes, after `walk`."""
        return self._reducer.pool.total + self._reducer.axis_pool.total

    def walk(self, actions: Sequence[Action]) -> tuple[float, str, int]:
        """(bytes of activations at the peak, when, live micro-batches)."""
        turns = [number for number, action in enumerate(actions) if action.kind is not Kind.FORWARD]
        self._gather()
        live: dict[tuple[int, int], float] = {}
        sent: dict[tuple[int, int], float] = {}
        peak, at, most = 0.0, "", 0
        for number, action in enumerate(actions):
            key = (action.stage, action.micro_batch)
            coming = self._coming(actions, number)
            others = sum(live.values()) + sum(sent.values()) + coming - live.get(key, 0.0)
            if action.kind is Kind.FORWARD:
                start = self._crossing if action.stage else 0.0
                top, net = self._forward(action.stage)
                highest = others + start + top
                live[key] = start + net
                self._arrive(sent, action)
            elif action.kind is Kind.WEIGHT:
                highest = others + live.pop(key)
                self._turn(action.stage, number == turns[0], number == turns[-1])
            else:
                received = self._crossing if action.stage < self._last else 0.0
                waiting = self._turn(action.stage, number == turns[0], number == turns[-1])
                highest = others + live[key] + received + self._backward(action.stage, received, waiting)
                if action.kind is Kind.BACKWARD:
                    live.pop(key)
                else:
                    live[key] = min(live[key], self._for_weights(action.stage))
                if action.stage:
                    sent[key] = self._crossing
            most = max(most, len(live))
            if highest > peak:
                peak, at = highest, action.full
        self._reducer.finish()
        update = self._agreeing()
        return (update, UPDATE, most) if update > peak else (peak, at, most)

    def _agreeing(self) -> float:
        """When all gradients are there: their norms."""
        small = large = 0
        for bucket in self._held.buckets:
            if bucket.trainable and bucket not in self._kept.away:
                numel, width = bucket.shard_numel, self._keeping.held_of(DTYPES[bucket.dtype])
                large += 0 if numel < SMALL else numel
                small += numel if numel < SMALL else 0
        norms = (small + large) / GROUP
        together = 8 * large / GROUP + (small * width + small / GROUP * NORM if small else 0)
        return max(together, 8 * norms + AGREED * min(norms, TOGETHER))

    def _gather(self) -> None:
        keeping = self._keeping
        if keeping.effective_level < 3:
            return
        stays = keeping.group == 1 and keeping.offload.parameters == "device"
        windows = PaperWindows(self._reducer.pool, keeping.prefetch, keeps=keeping.keeps_gathered, stays=stays)
        units = self._held.units
        for _ in range(2):
            for parts in self._at_stage.values():
                blocks = [units.get(place.number, ()) for place in parts if place.block]
                windows.step(blocks, self._held.outside)

    def _coming(self, actions: Sequence[Action], number: int) -> float:
        """Of what the next action receives, room is made before this one."""
        after = actions[number + 1] if number + 1 < len(actions) else None
        if after is None or after.kind is Kind.WEIGHT:
            return 0.0
        receives = after.stage > 0 if after.kind is Kind.FORWARD else after.stage < self._last
        return self._crossing if receives else 0.0

    def _arrive(self, sent: dict[tuple[int, int], float], action: Action) -> None:
        """A forward that comes tells that the gradients sent before it have arrived."""
        for key in [key for key in sent if key[0] == action.stage]:
            if key[1] < action.micro_batch:
                del sent[key]

    def _courses(self, place: Place) -> tuple[Course, Course]:
        part = place.part
        found = part.of_one if part.of_one and self._samples == 1 else part.courses
        return found.get(self._keeping.recompute, found["none"])

    def _forward(self, stage: int) -> tuple[float, float]:
        """(the highest, bytes that stay)."""
        if stage in self._forwards:
            return self._forwards[stage]
        level = top = 0.0
        for place in self._at_stage[stage]:
            course = self._courses(place)[0]
            top = max(top, level + max((_highest(rise.tops, self._samples) for rise in course.rises), default=0.0))
            level += course.net.of(self._samples)
        self._forwards[stage] = top, level
        return top, level

    def _turn(self, stage: int, first: bool, last: bool) -> dict[int, list[int]]:
        """Goes through the gradients. -> part -> bytes of gradients that wait before each rise."""
        reducer = self._reducer
        found: dict[int, list[int]] = {}
        if stage in self._waiting and self._turns > 2 * self._keeping.stages_per_rank and not last:
            return self._waiting[stage]  # All turns but the first and the last do the same.
        self._turns += 1
        reducer.begin(first=first, last=last)
        for place in reversed(self._at_stage[stage]):
            before = found[place.number] = []
            for rise in self._courses(place)[1].rises:
                before.append(reducer.waiting)
                if rise.gradient:
                    reducer.arrived(self._name(place, rise.gradient))
        reducer.end()
        self._waiting[stage] = found
        return found

    def _name(self, place: Place, gradient: str) -> str:
        """A course tells names of the model that was counted, in which a block has another number."""
        if not place.block:
            return gradient
        return f"{place.number}:{gradient.removeprefix(f'{place.part.name}.')}"

    def _backward(self, stage: int, received: float, waiting: Mapping[int, Sequence[int]]) -> float:
        """The highest above the start."""
        level = top = 0.0
        for at, place in enumerate(reversed(self._at_stage[stage])):
            course = self._courses(place)[1]
            for rise, wait in zip(course.rises, waiting[place.number]):
                top = max(top, level + wait + _highest(rise.tops, self._samples))
            level += course.net.of(self._samples) + (received if at == 0 else 0.0)
            if received and place.block:  # A stage keeps what its blocks have given until its backward is over.
                level += GIVEN * self._crossing
        return top

    def _for_weights(self, stage: int) -> float:
        """What the other half of a backward leaves: of products in blocks, their inputs and the gradients of what they
        gave."""
        width = BYTES[self._workload.dtype]
        rows = (
            product.m * (product.n + product.k) * product.times
            for place in self._at_stage[stage]
            if place.block
            for product in place.part.weights
        )
        return sum(rows) * width * self._samples


def _highest(tops: Sequence[Amount], samples: float) -> float:
    return max(one.fixed + one.each * samples for one in tops)
