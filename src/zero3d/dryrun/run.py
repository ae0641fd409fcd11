"""Rehearses ranks: `assemble` and `step` as they are, on paper.

The ranks of one pipeline are built together, one thread each, until every stage knows what crosses its boundaries;
those that were asked for then make a step alone. Schedules repeat themselves, so of many micro-batches only as many are
rehearsed as reach the schedule's peak; what the rest send and compute is what one in the middle does.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero3d import census
from zero3d.assemble import Parts, assemble
from zero3d.config import Config
from zero3d.contracts import Batch, Loss, ModelSource, OptimizerChoice
from zero3d.dryrun.asked import MOST_MICRO_BATCHES, check_asked, check_number
from zero3d.dryrun.copied import copied
from zero3d.dryrun.fakes import Fakes
from zero3d.dryrun.ledger import micro_batch_of, peak
from zero3d.dryrun.mail import PostOffice
from zero3d.dryrun.refusing import explained
from zero3d.dryrun.rehearsal import RankRehearsal, Rehearsal
from zero3d.dryrun.tracker import Tracker
from zero3d.dryrun.world import paper_mesh
from zero3d.errors import ConfigError, UsageError
from zero3d.layout import Layout, Place
from zero3d.optim.unheard import refuse_unheard
from zero3d.pipeline.action import Action, Kind, forwards_pile_up
from zero3d.pipeline.calling import Call
from zero3d.pipeline.schedules.own import find
from zero3d.pipeline.simulate import Costs, peak_live, simulate
from zero3d.step import train_step
from zero3d.trees import map_tensors

FEWEST = 3
"""Micro-batches that are rehearsed if there are so many: a first, a last and one in the middle."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is rehearsed: as `assemble` takes it. config: resolved; batch: one micro-batch, of which only
    the integers' values count."""

    source: ModelSource
    loss: Loss
    optimizer: OptimizerChoice
    config: Config
    batch: Batch
    call: Call | None = None

    @property
    def layout(self) -> Layout:
        parallel = self.config.parallel
        assert parallel.dp != "auto", "resolved"
        return Layout(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp)


def rehearse_model(
    model: ModelSource,
    loss: Loss,
    optimizer: OptimizerChoice | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    batch: Batch,
    world: int,
    ranks: Sequence[int] = (),
    micro_batches: int = 1,
    call: Call | None = None,
) -> Rehearsal:
    """A step of `ranks` of `world` (left out: each role once), on tensors without data: what they hold at the peak,
    send and compute. Starts no ranks, needs no weights, and takes as long whatever the world.

    model, loss, optimizer, config, call: as for `Engine`; batch: one micro-batch, of which only the shapes and the
    integers' values count. Raises what the run would raise before its first step, and `UsageError` for arguments that
    are none, for a model whose way hangs on the values of tensors, and for whatever the model or the loss raises.
    """
    check_asked(loss, config, batch, world, ranks, micro_batches)
    given = Config.load(config if config is not None else {})
    refuse_unheard(given, optimizer)
    resolved = given.resolved(world, native_bf16=True, own_batches=True)
    job = Job(
        source=copied(model),
        loss=loss,
        optimizer=resolved.optimizer.name if optimizer is None else optimizer,
        config=resolved,
        batch=batch,
        call=call,
    )
    return rehearse(job, ranks, micro_batches)


def default_ranks(layout: Layout) -> list[int]:
    """The distinct roles: of a pipeline the first, the middle and the last stage."""
    indices = dict.fromkeys((0, layout.pp // 2, layout.pp - 1))
    return [layout.rank(Place(dp=0, tp=0, pp=pp)) for pp in indices]


def rehearse(job: Job, ranks: Sequence[int] = (), micro_batches: int | None = None) -> Rehearsal:
    """A step of `ranks` (left out: `default_ranks`), of so many micro-batches (left out: as the configuration says).

    Raises what the run would, and `UsageError` for a model whose way hangs on values, or a rank that is not there.
    """
    began = time.perf_counter()
    layout = job.layout
    outside = [rank for rank in ranks if not 0 <= rank < layout.world]
    if outside:
        raise UsageError(
            f"there is no rank {outside[0]}: there are {layout.world} ranks", hint=f"Ranks are 0 to {layout.world - 1}."
        )
    chosen = list(ranks) or default_ranks(layout)
    wanted = job.config.micro_batches if micro_batches is None else micro_batches
    check_number("micro_batches", wanted, MOST_MICRO_BATCHES, "micro-batches of a step")
    rehearsed = _enough(job.config, wanted)
    lines: dict[tuple[int, int], list[int]] = {}
    for rank in chosen:
        place = layout.place(rank)
        lines.setdefault((place.dp, place.tp), []).append(rank)
    found: dict[int, RankRehearsal] = {}
    forwards: dict[int, int] = {}
    for line, asked in lines.items():
        one = _Line(job, line, frozenset(asked), rehearsed, wanted)
        found |= one.run()
        forwards |= one.forwards
    bubble, timeline = _timeline(job.config, wanted, found, forwards)
    return Rehearsal(
        world=layout.world,
        ranks=[found[rank] for rank in chosen],
        micro_batches=wanted,
        rehearsed=rehearsed,
        bubble=bubble,
        timeline=timeline,
        seconds=time.perf_counter() - began,
    )


class _Line:
    """The stages of one pipeline, of which `asked` make a step; `forwards`: FLOPs of each stage's forward."""

    def __init__(self, job: Job, line: tuple[int, int], asked: frozenset[int], rehearsed: int, wanted: int) -> None:
        self._job = job
        self._line = line
        self._asked = asked
        self._rehearsed = rehearsed
        self._wanted = wanted
        self._office = PostOffice()
        self.forwards: dict[int, int] = {}

    def run(self) -> dict[int, RankRehearsal]:
        layout = self._job.layout
        dp, tp = self._line
        ranks = [layout.rank(Place(dp=dp, tp=tp, pp=pp)) for pp in range(layout.pp)]
        if len(ranks) == 1:
            alone = self._rank(ranks[0])
            return {ranks[0]: alone} if alone is not None else {}
        with ThreadPoolExecutor(len(ranks)) as threads:
            pending = {rank: threads.submit(self._rank, rank) for rank in ranks}
            errors = [error for one in pending.values() if (error := one.exception()) is not None]
        for error in sorted(errors, key=lambda error: "pp failed" in str(error)):
            raise error
        results = {rank: one.result() for rank, one in pending.items()}
        return {rank: result for rank, result in results.items() if result is not None}

    def _rank(self, rank: int) -> RankRehearsal | None:
        job, config = self._job, self._job.config
        mesh, mail = paper_mesh(job.layout, rank, self._office, config.zero.replicas)
        with ExitStack() as inside, explained("the step cannot be rehearsed"):
            inside.enter_context(self._office.working())
            inside.enter_context(torch.enable_grad())
            inside.enter_context(Fakes())
            batch = map_tensors(_without_values, job.batch)
            parts = assemble(job.source, job.loss, job.optimizer, config, mesh, job.call)
            inside.callback(parts.close)
            parts.model.train()
            if mail is not None:
                parts.pipeline.agree(batch)
                self._try_forward(parts, batch)
                mail.cut_off()
            return self._step(parts, rank, batch) if rank in self._asked else None

    def _try_forward(self, parts: Parts, batch: Batch) -> None:
        """Each stage learns the header of what it gets; that of evaluation is that of training, if gradients count."""
        with Tracker(parts.model) as tracker, torch.enable_grad():
            for number, stage in sorted(parts.stages.items()):
                with tracker.acting(Action(Kind.FORWARD, number, 0)):
                    before = tracker.flops.total()
                    stage.forward(0, batch)
                    self.forwards[number] = tracker.flops.total() - before
            for stage in parts.stages.values():
                stage.start()
        parts.pipeline.settle()
        parts.replica.finish()  # What it has gathered is gone again when a step begins.

    def _step(self, parts: Parts, rank: int, batch: Batch) -> RankRehearsal:
        batches = [batch] * self._rehearsed
        if self._job.config.offload.optimizer != "device":
            train_step(parts, batches[:1], 0, 1.0)  # Its new weights travel in the step after it.
        tracker = Tracker(parts.model)
        for axis in parts.axes:
            axis.sent_bytes = 0
            axis.watcher = tracker
        with tracker:
            train_step(parts, batches, 1, 1.0, tracker)
            parts.replica.settle()
            lasting = tracker.lasting(census.tensors(parts), parts.replica.lent())
        more = self._wanted - self._rehearsed
        middle = min(1, self._rehearsed - 1)
        flops = tracker.flops.total() + more * sum(
            count for action, count in tracker.flops.items() if micro_batch_of(action) == middle
        )
        return RankRehearsal(
            rank=rank,
            stages=sorted(parts.stages),
            parameters=sum(info.local.numel for info in parts.infos if parts.pipeline.placed.has(info.name)),
            peak=peak(tracker.lives, lasting),
            lasting=lasting,
            traffic=tracker.traffic(parts.axes, middle, more),
            flops=flops,
            notice=parts.notice,
        )


def _without_values(tensor: Tensor) -> Tensor:
    """Integers keep theirs: they are looked up, counted and masked."""
    return torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_floating_point() else tensor


def _enough(config: Config, wanted: int) -> int:
    """The fewest micro-batches with which every rank holds as many activations as with all of them, and no sums of
    gradients rest that would not."""
    parallel = config.parallel
    schedule = find(parallel.schedule)
    stages = parallel.pp * parallel.stages_per_rank

    def live(number: int) -> tuple[list[int], list[bool]] | None:
        try:
            ranks = schedule.actions(stages, parallel.pp, number)
        except ConfigError:  # e.g. interleaved stages want a multiple of pp
            return None
        return peak_live(ranks), [forwards_pile_up(actions) for actions in ranks]

    most = live(wanted)
    fewest = min(FEWEST, wanted)
    return next((number for number in range(fewest, wanted) if live(number) == most), wanted)


def _timeline(
    config: Config, micro_batches: int, found: Mapping[int, RankRehearsal], forwards: Mapping[int, int]
) -> tuple[float, list[list[tuple[str, float, float]]]]:
    """(bubble, what each index on pp does when) if each action takes as long as its FLOPs say."""
    parallel = config.parallel
    if parallel.pp == 1:
        return 0.0, []
    stages = parallel.pp * parallel.stages_per_rank
    actions = find(parallel.schedule).actions(stages, parallel.pp, micro_batches)
    costs = [float(max(forwards[stage], 1)) for stage in range(stages)]
    again = [cost * (config.recompute.mode == "block") for cost in costs]
    inputs = [cost + more for cost, more in zip(costs, again)]
    run = simulate(actions, Costs(forward=costs, input_backward=inputs, weight_backward=costs))
    whole = run.makespan or 1.0
    rows = [[(one.action.full, one.start / whole, one.end / whole) for one in runs] for runs in run.ranks]
    return run.bubble, rows
