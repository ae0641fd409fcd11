"""What the planner says that a rank holds, and what its rehearsal finds, for tests and by hand.

python -m tests.planned [NAME ...]
"""

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

import torch

from tests.rehearsed import LENGTH, MODELS, POINTS, Point, class_loss, config_of
from zero3d.dryrun.count import Subject, count
from zero3d.dryrun.rehearsal import RankRehearsal
from zero3d.dryrun.run import Job, rehearse
from zero3d.dryrun.whole_loss import whole_loss
from zero3d.planner.footprint import Footprint, footprint
from zero3d.planner.keeping import Keeping
from zero3d.planner.sending import Sent, sent_by
from zero3d.planner.workload import Workload

KINDS = ("weights", "gradients", "optimizer")


@lru_cache
def workload_of(model: str, dtype: str, tp: int, sequence_parallel: bool) -> Workload:
    one = MODELS[model]
    loss: Any = one.loss if one.loss is class_loss else whole_loss
    subject = Subject(build=one.build, batch=one.batch, tokens=LENGTH, loss=loss, name=model, call=one.call)
    return count(subject, dtype=dtype, tp=tp, sequence_parallel=sequence_parallel)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What was planned for a rank, and what its rehearsal found."""

    planned: Footprint
    sent: dict[str, Sent]
    rehearsed: RankRehearsal

    @property
    def apart(self) -> float:
        """Of the peak."""
        return self.planned.total / self.rehearsed.peak.total - 1


def both(point: Point) -> list[Pair]:
    """Of the first rank of each pipeline stage."""
    model = MODELS[point.model]
    config = config_of(point).resolved(point.ranks, native_bf16=False, own_batches=True)
    job = Job(
        source=model.build,
        loss=model.loss,
        optimizer="adamw",
        config=config,
        batch=model.batch(point.size),
        call=model.call,
    )
    layout = job.layout
    ranks = [pp * layout.dp * layout.tp for pp in range(layout.pp)]
    rehearsal = rehearse(job, ranks, point.micro_batches)
    dtype = "bf16" if config.precision.compute == "bf16" else "fp32"
    workload = workload_of(point.model, dtype, layout.tp, config.parallel.sequence_parallel)
    keeping = Keeping.of(config, point.micro_batches, threads=threads_of_update(point.ranks))
    return [
        Pair(planned=footprint(workload, keeping, pp), sent=sent_by(workload, keeping, pp), rehearsed=found)
        for pp, found in enumerate(rehearsal.ranks)
    ]


def table(points: list[Point]) -> None:
    errors, same_calls = [], 0
    for point in points:
        for pair in both(point):
            planned, rehearsed = pair.planned, pair.rehearsed
            errors.append(abs(pair.apart))
            kinds = {
                kind: (planned.by_kind[kind], found)
                for kind, found in rehearsed.peak.by_kind.items()
                if planned.by_kind[kind] != found
            }
            host = (planned.host_bytes, rehearsed.host_bytes)
            more = "" if host[0] == host[1] else f"host {host} "
            calls = {axis: (pair.sent[axis].calls, number) for axis, number in number_of_calls(rehearsed).items()}
            same_calls += all(one == other for one, other in calls.values())
            more += "" if all(one == other for one, other in calls.values()) else f"calls {calls} "
            where = f"{planned.at} {rehearsed.peak.action}"
            print(f"{pair.apart:8.2%} {point} rank {rehearsed.rank} {where} {more}{kinds}", flush=True)
    print(
        f"{len(points)} points, {len(errors)} ranks: median {median(errors):.2%}, largest {max(errors):.2%}; "
        f"as many calls: {same_calls} ranks"
    )


def threads_of_update(ranks: int) -> int:
    """In a rehearsal all ranks are on this machine, and share its cores; kernels of torch use what it is told."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // ranks, torch.get_num_threads())


def number_of_calls(rehearsed: RankRehearsal) -> dict[str, int]:
    """By axis."""
    return {axis: sum(traffic.calls.values()) for axis, traffic in rehearsed.traffic.items()}


if __name__ == "__main__":
    table([point for point in POINTS if not sys.argv[1:] or any(name in str(point) for name in sys.argv[1:])])
