"""How long a step takes: a workload in a layout on a cluster, by cause. Pure.

pipeline     stages' forwards and backwards (`speed`), with gathers of level 3 that computing does not hide
             (`dp_time`), by the simulator (`waiting`)
reductions   what the last backward does not hide
update       bytes of model states over the memory bandwidth; with offload the host's rate, and copies
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from zero3d.pipeline.partition import Cost, partition
from zero3d.pipeline.schedules.own import find
from zero3d.planner.dp_time import OverDp
from zero3d.planner.hardware import Cluster
from zero3d.planner.network import message
from zero3d.planner.run import Run
from zero3d.planner.speed import PartSeconds, Seconds, Speed
from zero3d.planner.waiting import makespan, rough
from zero3d.planner.workload import Part, Workload


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, of the rank that computes most, and what follows from them.

    products .. tp: in all forwards and backwards; again: computed once more; gathers, reductions: over dp, as far as
    nothing hides them; idle: waits for other stages; update: on the device; host: update and copies, not hidden
    flops: of the whole step on all devices, as Narayanan et al. 2021 count them without what is computed again
    flops_done: with it
    """

    seconds: float
    products: float
    attention: float
    moving: float
    tp: float
    again: float
    gathers: float
    reductions: float
    idle: float
    update: float
    host: float
    bubble: float
    tokens: float
    flops: float
    flops_done: float
    devices: int
    peak: float = field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def exposed(self) -> float:
        """Seconds of traffic that computing does not hide."""
        return self.tp + self.gathers + self.reductions

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of one device, with what is computed again."""
        return self.flops_done / self.seconds / self.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs, without what is computed again, of the peak (Chowdhery et al. 2022, appendix B)."""
        return self.flops / self.seconds / self.devices / self.peak

    @property
    def hfu(self) -> float:
        return self.flops_done / self.seconds / self.devices / self.peak


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Of one micro-batch. forward_wait, backward_wait: for gathers and reductions of each turn, not hidden."""

    parts: Sequence[Part]
    computing: PartSeconds
    forward_wait: float = 0.0
    backward_wait: float = 0.0

    @property
    def forward(self) -> float:
        return self.computing.forward.total + self.forward_wait

    @property
    def input_backward(self) -> float:
        return self.computing.backward.total + self.computing.again.total + self.backward_wait

    @property
    def weight_backward(self) -> float:
        return self.computing.weights.total

    @property
    def total(self) -> float:
        return self.forward + self.input_backward + self.weight_backward


def step_time(cluster: Cluster, workload: Workload, run: Run, *, simulated: bool = True) -> StepTime:
    """`simulated`: the pipeline's schedule is run by the simulator, not guessed by a formula (`waiting.rough`).

    Raises `ConfigError` for a schedule or a cut that does not fit the numbers, and `UsageError` for a dtype of which
    the cluster says nothing."""
    stages = stage_times(cluster, workload, run)
    traffic = OverDp(cluster, workload, run)
    ranks = _ranks(run)
    schedule = run.schedule if run.stages > 1 else "accumulate"
    spent = (makespan if simulated else rough)(
        schedule,
        run.pp,
        run.micro_batches,
        tuple(stage.forward for stage in stages),
        tuple(stage.input_backward for stage in stages),
        tuple(stage.weight_backward for stage in stages),
        transfer(cluster, workload, run),
    )
    busiest = max(ranks, key=lambda mine: sum(stages[at].total for at in mine))
    mine = [stages[at] for at in busiest]
    ideal = run.micro_batches * sum(stage.total for stage in mine)
    computing = sum((stage.computing for stage in mine), PartSeconds())
    passes = computing.forward + computing.backward + computing.weights
    held = max(sum(_held(part, run) for at in one for part in stages[at].parts) for one in ranks)
    last_backward = sum(stage.computing.whole_backward for stage in mine)
    first_forward = sum(stage.forward for stage in mine)
    reductions = traffic.reductions(held, last_backward) + traffic.publishing(held, first_forward)
    update, host = traffic.update(held, last_backward, spent)
    turns = run.micro_batches
    flops = workload_flops(workload, run)
    return StepTime(
        seconds=spent + reductions + update + host,
        products=turns * passes.products,
        attention=turns * passes.attention,
        moving=turns * passes.moving,
        tp=turns * passes.tp,
        again=turns * computing.again.total,
        gathers=turns * sum(stage.forward_wait + stage.backward_wait for stage in mine),
        reductions=reductions,
        idle=spent - ideal,
        update=update,
        host=host,
        bubble=(spent - ideal) / ideal if ideal else 0.0,
        tokens=run.samples * workload.tokens,
        flops=flops[0],
        flops_done=flops[1],
        devices=run.dp * run.pp * workload.tp,
        peak=cluster.device.peak(workload.dtype),
    )


def stage_times(cluster: Cluster, workload: Workload, run: Run) -> list[StageTime]:
    """Of each stage of the pipeline, in order."""
    speed = Speed(cluster=cluster, dtype=workload.dtype, tp=workload.tp, software=run.software)
    traffic = OverDp(cluster, workload, run)
    kinds = [speed.part(kind, run.micro_batch, run.recompute) for kind in workload.kinds]
    edges = [speed.part(part, run.micro_batch) for part in (workload.before, workload.after)]
    found: list[StageTime] = []
    known: dict[tuple[bool, bool, tuple[int, ...]], StageTime] = {}
    for at, blocks in enumerate(stage_blocks(workload, run)):
        key = (at == 0, at == run.stages - 1, tuple(workload.order[block] for block in blocks))
        if key in known:  # Most stages are alike.
            found.append(known[key])
            continue
        parts = [workload.kinds[workload.order[block]] for block in blocks]
        times = [kinds[workload.order[block]] for block in blocks]
        if at == 0:
            parts, times = [workload.before, *parts], [edges[0], *times]
        if at == run.stages - 1:
            parts, times = [*parts, workload.after], [*times, edges[1]]
        forward_wait, backward_wait = traffic.waits(parts, times)
        adding = PartSeconds(weights=Seconds(moving=traffic.adding(parts)))
        known[key] = StageTime(
            parts=parts,
            computing=sum(times, adding),
            forward_wait=forward_wait,
            backward_wait=backward_wait,
        )
        found.append(known[key])
    return found


def stage_blocks(workload: Workload, run: Run) -> Sequence[range]:
    """The blocks of each stage, as a run cuts them: by the elements that are multiplied with."""
    number = len(workload.order)
    if run.stage_blocks:
        ends = list(accumulate(run.stage_blocks))
        assert len(ends) == run.stages and ends[-1] == number, "as checked where they were given"
        return [range(end - size, end) for size, end in zip(run.stage_blocks, ends)]
    if run.stages == 1:
        return [range(number)]
    sizes = tuple(workload.kinds[kind].multiplied for kind in workload.order)
    return _cut(sizes, run.stages, workload.before.multiplied, workload.after.multiplied)


@lru_cache(maxsize=256)
def _cut(sizes: tuple[int, ...], stages: int, before: int, after: int) -> Sequence[range]:
    costs = [Cost(time=size) for size in sizes]
    return partition(costs, stages, before=Cost(time=before), after=Cost(time=after)).blocks


def transfer(cluster: Cluster, workload: Workload, run: Run) -> float:
    """Seconds that a micro-batch takes from one stage to the next."""
    if run.pp == 1:
        return 0.0
    num_bytes = workload.blocks[0].leaving.of(run.micro_batch)
    if run.software.scattered:
        num_bytes /= workload.tp
    return message(cluster, run.dp * workload.tp, num_bytes)


def workload_flops(workload: Workload, run: Run) -> tuple[float, float]:
    """(FLOPs of a step on all devices, the same with what is computed again)."""
    blocks = [(workload.kinds[kind], number) for kind, number in Counter(workload.order).items()]
    parts = [(workload.before, 1), *blocks, (workload.after, 1)]
    forward = sum(number * part.forward.flops(run.samples) for part, number in parts) * workload.tp
    backward = sum(
        number * (part.backward.flops(run.samples) + sum(one.flops(run.samples) for one in part.weights))
        for part, number in parts
    )
    again = sum(
        number
        * (
            sum(one.flops(run.samples) for one in block.forward.products) * run.recompute.products
            + (block.forward.fused * run.samples + sum(one.flops(run.samples) for one in block.forward.attention))
            * run.recompute.attention
        )
        for block, number in blocks
    )
    once = forward + backward * workload.tp
    return once, once + again * workload.tp


def _held(part: Part, run: Run) -> int:
    """Trained elements; a weight that an earlier stage has too, such as a tied head's, is held by both."""
    borrowed = sum(one.numel for one in part.borrowed if one.trainable) if run.stages > 1 else 0
    return part.trained + borrowed


def _ranks(run: Run) -> list[list[int]]:
    """The stages of each rank."""
    if run.pp == 1:
        return [list(range(run.stages))]
    return [list(stages) for stages in find(run.schedule).placement(run.stages, run.pp)]
