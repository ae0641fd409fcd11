"""What of a rank does not depend on how many samples a micro-batch has: its buckets, what lives over steps, and the
buffers and waiting gradients of each turn, by going through a step's gathers and reductions on paper. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from zero3d.comm.bucket import Bucket
from zero3d.pipeline.action import Action, Kind, forwards_pile_up, taken_before, whole_backwards
from zero3d.pipeline.schedules.own import find
from zero3d.planner.gathering import PaperWindows
from zero3d.planner.keeping import Keeping, Place, places
from zero3d.planner.reducing import PaperReducer
from zero3d.planner.run import Run
from zero3d.planner.states import Held, Lasting, held_by, lasting
from zero3d.planner.timing import stage_blocks
from zero3d.planner.workload import Course, Part, Workload

Waiting = Mapping[int, Sequence[tuple[int, int]]]
"""Part -> before each rise of its backward, bytes of gradients that wait to be collected, and of sums that have memory,
of those that `Standing.resting` counts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Standing:
    """waiting: of each action that is a turn, by its number; pools: bytes that gathers and reductions keep
    resting: bytes of the sums of gradients that have no memory before the step's first gradients
    arrived: (stage, micro-batch) of a forward -> micro-batches whose gradients have come to the stage before it then
    """

    actions: Sequence[Action]
    at_stage: Mapping[int, Sequence[Place]]
    held: Held
    kept: Lasting
    waiting: Mapping[int, Waiting]
    arrived: Mapping[tuple[int, int], Sequence[int]]
    pools: int
    resting: int

    @property
    def places(self) -> list[Place]:
        """The rank's parts."""
        return [place for stage in self.at_stage.values() for place in stage]


@lru_cache(maxsize=128)
def standing_of(workload: Workload, keeping: Keeping, index: int) -> Standing:
    """Of a rank that is number `index` on pp, in a step of `keeping`'s number of micro-batches. Of its samples counts
    only whether there is more than one."""
    ranks = all_actions(keeping, keeping.micro_batches)
    actions = ranks[index]
    at_stage, held = _parts(workload, _for_buckets(keeping), tuple(sorted({action.stage for action in actions})))
    kept = lasting(keeping, held)
    trained = [bucket for bucket in held.buckets if bucket.trainable]
    reducer = PaperReducer(trained, keeping, kept.away, rests=forwards_pile_up(actions))
    if keeping.effective_level >= 3:
        stays = keeping.group == 1 and keeping.offload.parameters == "device"
        windows = windows_of(reducer, keeping, held, stays=stays)
        for _ in range(2):
            for stage in at_stage:
                blocks = stage_buckets(held, at_stage[stage])
                windows.forward(blocks, held.outside)
                windows.backward(blocks, held.outside)
    waiting = _turns(reducer, keeping, at_stage, actions)
    return Standing(
        actions=actions,
        at_stage=at_stage,
        held=held,
        kept=kept,
        waiting=waiting,
        arrived=_arrived(ranks, at_stage),
        pools=reducer.pool.total + reducer.axis_pool.total,
        resting=reducer.resting,
    )


def _arrived(ranks: Sequence[Sequence[Action]], stages: Iterable[int]) -> dict[tuple[int, int], Sequence[int]]:
    rank_of = {action.stage: actions for actions in ranks for action in actions}
    return {
        (stage, micro_batch): taken
        for stage in stages
        if stage
        for micro_batch, taken in taken_before(rank_of[stage - 1], stage - 1).items()
    }


@lru_cache(maxsize=256)
def _schedule(name: str, stages: int, ranks: int, micro_batches: int) -> Sequence[Sequence[Action]]:
    return [whole_backwards(actions) for actions in find(name).actions(stages, ranks, micro_batches)]


def all_actions(keeping: Keeping, micro_batches: int) -> Sequence[Sequence[Action]]:
    """Of each rank of the pipeline, or of the only one."""
    schedule = keeping.schedule if keeping.stages > 1 else "accumulate"
    return _schedule(schedule, keeping.stages, keeping.pp, micro_batches)


def _for_buckets(keeping: Keeping) -> Keeping:
    """All that decides which buckets there are."""
    return Keeping(
        group=keeping.group,
        pp=keeping.pp,
        stages_per_rank=keeping.stages_per_rank,
        stage_blocks=keeping.stage_blocks,
        level=keeping.effective_level,
        bucket_bytes=keeping.bucket_bytes,
    )


@lru_cache(maxsize=256)
def _parts(workload: Workload, keeping: Keeping, stages: tuple[int, ...]) -> tuple[Mapping[int, list[Place]], Held]:
    """The parts of each stage of a rank that has `stages`, and its buckets."""
    run = Run(pp=keeping.pp, stages_per_rank=keeping.stages_per_rank, stage_blocks=keeping.stage_blocks)
    at_stage = places(workload, list(stage_blocks(workload, run)), list(stages))
    return at_stage, held_by(workload, keeping, [place for stage in at_stage.values() for place in stage])


def windows_of(reducer: PaperReducer, keeping: Keeping, held: Held, *, stays: bool = False) -> PaperWindows:
    return PaperWindows(reducer.pool, keeping.prefetch, keeps=keeping.keeps_gathered, stays=stays, shared=held.shared)


def stage_buckets(held: Held, stage: Sequence[Place]) -> list[Sequence[Bucket]]:
    """Those of each block of a stage."""
    return [held.units.get(place.number, ()) for place in stage if place.block]


def courses_of(part: Part, keeping: Keeping) -> tuple[Course, Course]:
    """(forward, backward)"""
    found = part.of_one if part.of_one and keeping.micro_batch == 1 else part.courses
    return found[keeping.recompute if keeping.recompute in found else "none"]


def _turns(
    reducer: PaperReducer, keeping: Keeping, at_stage: Mapping[int, Sequence[Place]], actions: Sequence[Action]
) -> dict[int, Waiting]:
    """Goes through the gradients of each turn."""
    turns = [number for number, action in enumerate(actions) if action.kind is not Kind.FORWARD]
    coming = {place.number: _gradients(keeping, place) for stage in at_stage.values() for place in stage}
    found: dict[int, Waiting] = {}
    known: dict[int, Waiting] = {}
    gone_through = 0
    for number in turns:
        stage = actions[number].stage
        # All turns but the first and the last do the same.
        if stage not in known or gone_through <= 2 * keeping.stages_per_rank or number == turns[-1]:
            gone_through += 1
            reducer.begin(first=number == turns[0], last=number == turns[-1])
            parts = reversed(at_stage[stage])
            known[stage] = {place.number: _arrivals(reducer, coming[place.number]) for place in parts}
            reducer.end()
        found[number] = known[stage]
    reducer.finish()
    return found


def _gradients(keeping: Keeping, place: Place) -> list[str]:
    """Of each rise of its backward the parameter whose gradient is there then, or nothing."""
    rises = courses_of(place.part, keeping)[1].rises
    return [_name(place, rise.gradient) if rise.gradient else "" for rise in rises]


def _arrivals(reducer: PaperReducer, coming: Sequence[str]) -> list[tuple[int, int]]:
    before = []
    for name in coming:
        before.append((reducer.waiting, reducer.woken))
        if name:
            reducer.arrived(name)
    return before


def _name(place: Place, gradient: str) -> str:
    """A course tells names of the model that was counted, in which a block has another number."""
    if not place.block:
        return gradient
    return f"{place.number}:{gradient.removeprefix(f'{place.part.name}.')}"
