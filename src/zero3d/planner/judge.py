"""What one choice comes to: whether it can be, whether it fits, how fast it is. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from zero3d.errors import ConfigError, Zero3dError
from zero3d.pipeline.action import forwards_pile_up
from zero3d.pipeline.schedules.own import find
from zero3d.pipeline.simulate import peak_live
from zero3d.planner.choice import Choice
from zero3d.planner.footprint import Footprint, footprint
from zero3d.planner.hardware import Cluster
from zero3d.planner.memory import Widths, states
from zero3d.planner.run import Run
from zero3d.planner.sending import Sent, sent_by
from zero3d.planner.speed import BYTES
from zero3d.planner.standing import courses_of
from zero3d.planner.timing import StepTime, stage_blocks, step_time
from zero3d.planner.workload import Workload

RESERVE = 0.08
"""Of a device's memory, for what is not the run's: the driver, libraries, holes between the allocator's blocks."""
HOST_RESERVE = 0.1
"""The same of a host's, whose processes and files want room too."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What is planned for.

    workload: that of a rank of tp, with or without sequence parallel; raises `Zero3dError` for a cut that cannot be
    global_batch: samples; host_memory: bytes of a machine; machine: devices that one can have
    """

    cluster: Cluster
    devices: int
    global_batch: int
    dtype: str
    workload: Callable[[int, bool], Workload]
    blocks: int
    host_memory: float
    machine: int

    @property
    def weight(self) -> int:
        return BYTES[self.dtype]

    @property
    def memory(self) -> float:
        """Bytes of a device that a run may take."""
        return self.cluster.device.memory * (1 - RESERVE)

    @property
    def host_of_rank(self) -> float:
        """Bytes of a machine's memory that each of its ranks may take."""
        ranks = min(self.cluster.per_node, self.devices)
        return self.host_memory * (1 - HOST_RESERVE) / ranks

    @property
    def threads(self) -> int:
        return max(self.cluster.host.cores // self.cluster.per_node, 1)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """why: "cannot be", "does not fit" or "slower"; number: what makes it so, in `unit`: bytes, tokens/s, a count."""

    choice: Mapping[str, int | str | bool]
    why: str
    reason: str
    number: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice that fits. sent: by axis, of the pipeline's first rank in a step"""

    choice: Choice
    time: StepTime
    footprint: Footprint
    sent: Mapping[str, Sent] = field(default_factory=dict)


def layout_of(choice: Choice) -> dict[str, int | str | bool]:
    """What tells it from others."""
    return {
        "dp": choice.dp,
        "tp": choice.tp,
        "pp": choice.pp,
        "schedule": choice.schedule,
        "stages_per_rank": choice.stages_per_rank,
        "level": choice.level,
        "reduce": choice.reduce,
        "keep_gathered": choice.keep_gathered,
        "sequence_parallel": choice.sequence_parallel,
        "micro_batch": choice.micro_batch,
        "recompute": choice.recompute,
        "offload": choice.offload,
    }


def refusal(choice: Choice, why: str, reason: str, number: float, unit: str) -> Rejected:
    return Rejected(choice=layout_of(choice), why=why, reason=reason, number=number, unit=unit)


def impossible(aim: Aim, choice: Choice) -> Rejected | None:
    """Why it cannot be, if so."""
    stages = choice.pp * choice.stages_per_rank
    if aim.global_batch % choice.dp:
        left = aim.global_batch % choice.dp
        return refusal(
            choice, "cannot be", f"{aim.global_batch} samples over dp {choice.dp} leave {left}", left, "samples"
        )
    if stages > max(aim.blocks, 1):
        return refusal(choice, "cannot be", f"{stages} stages for {aim.blocks} blocks", stages, "stages")
    if choice.samples % choice.micro_batch or choice.micro_batch > choice.samples:
        return refusal(
            choice,
            "cannot be",
            f"micro-batches of {choice.micro_batch} do not make up a rank's {choice.samples} samples",
            choice.samples % choice.micro_batch or choice.samples,
            "samples",
        )
    if choice.pp > 1:
        try:
            find(choice.schedule).check(stages, choice.pp, choice.micro_batches)
            _actions_live(choice.schedule, stages, choice.pp, few(choice))
        except ConfigError as error:
            return refusal(choice, "cannot be", error.message, choice.micro_batches, "micro-batches")
    try:
        aim.workload(choice.tp, choice.sequence_parallel)
    except Zero3dError as error:
        return refusal(choice, "cannot be", error.message, choice.tp, "ranks of tp")
    return None


def few(choice: Choice) -> int:
    """Micro-batches with which a schedule holds as much as with all."""
    if choice.pp == 1:
        return min(choice.micro_batches, 3)
    return choice.micro_batches if choice.schedule == "gpipe" else min(choice.micro_batches, 3 * choice.pp)


@lru_cache(maxsize=1024)
def _actions_live(schedule: str, stages: int, ranks: int, micro_batches: int) -> tuple[int, bool]:
    """Of the pipeline's first rank: the most micro-batches that are live, and whether sums of gradients rest."""
    actions = find(schedule if stages > 1 else "accumulate").actions(stages, ranks, micro_batches)
    return peak_live(actions)[0], forwards_pile_up(actions[0])


def at_least(aim: Aim, choice: Choice, *, courses: bool = False) -> float:
    """Bytes that it takes on a device in any case, from few numbers. courses: from what blocks hold while they run,
    which takes seconds to be counted for the first choice that asks; else from what their operations save."""
    workload = aim.workload(choice.tp, choice.sequence_parallel)
    run = Run(pp=choice.pp, stages_per_rank=choice.stages_per_rank)
    keeping = choice.keeping(aim.weight, 1)
    stages = list(stage_blocks(workload, run))
    live, rests = _actions_live(choice.schedule, len(stages), choice.pp, few(choice))
    mine = stages[:: choice.pp]
    block = workload.kinds[workload.order[stages[0][0]]] if stages[0] else workload.before
    if courses:
        of_block = courses_of(block, keeping)[0].net.of(choice.micro_batch)
        activations = of_block * min(map(len, mine)) * max(live, 1)
    else:
        held = (block.saved if choice.recompute == "none" else block.leaving).of(choice.micro_batch)
        activations = held * len(stages[0]) * max(live, 1)
    if rests:
        activations *= 1 - 1 / live  # When the sums of gradients are all there, those of one are gone.
    if choice.recompute == "block":  # One is computed again.
        activations += block.saved.of(choice.micro_batch)
    parameters = block.numel * sum(map(len, mine))
    moments = Widths(weights=aim.weight, gradients=4, optimizer=8 + (4 if aim.weight != 4 else 0))
    kept = states(
        parameters,
        choice.level,
        dp=choice.dp,
        widths=moments,
        reduce=choice.reduce,
        offload=keeping.offload,
    )
    gathered = parameters * aim.weight if choice.keep_gathered else 0
    return kept.device + gathered + activations * 0.95


def fits(aim: Aim, choice: Choice) -> tuple[Footprint, Rejected | None]:
    """The footprint of the rank that holds most, and why it does not fit, if so."""
    workload = aim.workload(choice.tp, choice.sequence_parallel)
    keeping = choice.keeping(aim.weight, aim.threads)
    found = [footprint(workload, keeping, index, micro_batches=few(choice)) for index in _fullest(workload, choice)]
    most = max(found, key=lambda one: one.total)
    if most.total > aim.memory:
        reason = f"{gb(most.total)} of {gb(aim.memory)} that a device has for it"
        return most, refusal(choice, "does not fit", reason, most.total, "bytes")
    host = max(found, key=lambda one: one.host_bytes)
    if host.host_bytes > aim.host_of_rank:
        reason = f"{gb(host.host_bytes)} of its host, which has {gb(aim.host_of_rank)} a rank"
        return host, refusal(choice, "does not fit", reason, host.host_bytes, "host bytes")
    return most, None


def _fullest(workload: Workload, choice: Choice) -> list[int]:
    """Ranks of the pipeline of which one holds most: the first, the last, and where others have more blocks than the
    first, the first of those that have so many."""
    if choice.pp == 1:
        return [0]
    stages = stage_blocks(workload, Run(pp=choice.pp, stages_per_rank=choice.stages_per_rank))
    placed = find(choice.schedule).placement(len(stages), choice.pp)
    blocks = [sum(len(stages[stage]) for stage in mine) for mine in placed]
    more = {number: rank for rank, number in reversed(list(enumerate(blocks))) if number > blocks[0]}
    return sorted({0, choice.pp - 1, *more.values()})


def timed(aim: Aim, choice: Choice, *, simulated: bool = True) -> StepTime:
    workload = aim.workload(choice.tp, choice.sequence_parallel)
    return step_time(aim.cluster, workload, choice.run(aim.weight), simulated=simulated)


def bound(aim: Aim, choice: Choice) -> float:
    """Seconds of a step that any way of keeping takes: computing, and waits of the pipeline, less what formulas may be
    wrong by."""
    run = choice.changed(dp=1, level=0, reduce="step", keep_gathered=False, offload="none")
    found = timed(aim, run, simulated=False)
    return (found.seconds - found.update - found.host - max(found.idle, 0.0)) * 0.999


def sent(aim: Aim, choice: Choice) -> dict[str, Sent]:
    """What the pipeline's first rank sends in a step, by axis."""
    workload = aim.workload(choice.tp, choice.sequence_parallel)
    return sent_by(workload, choice.keeping(aim.weight, aim.threads), few=few(choice))


def slower(times: float) -> str:
    """Such as 4.9% slower, and 4.1 times slower."""
    return f"{times - 1:.1%} slower" if times < 2 else f"{times:.1f} times slower"


def gb(num_bytes: float) -> str:
    """Such as 79.1 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"
