"""What the planner says that a rank holds, and what its rehearsal finds, for tests and by hand.

python -m tests.planned [NAME ...]
"""

import sys
from functools import lru_cache
from typing import Any

from tests.rehearsed import LENGTH, MODELS, POINTS, Point, class_loss, config_of
from zero3d.dryrun.count import Subject, count
from zero3d.dryrun.rehearsal import RankRehearsal
from zero3d.dryrun.run import Job, rehearse
from zero3d.dryrun.whole_loss import whole_loss
from zero3d.planner.footprint import Footprint, footprint
from zero3d.planner.keeping import Keeping
from zero3d.planner.workload import Workload

KINDS = ("weights", "gradients", "optimizer")


@lru_cache
def workload_of(model: str, dtype: str, tp: int, sequence_parallel: bool) -> Workload:
    one = MODELS[model]
    loss: Any = one.loss if one.loss is class_loss else whole_loss
    subject = Subject(build=one.build, batch=one.batch, tokens=LENGTH, loss=loss, name=model, call=one.call)
    return count(subject, dtype=dtype, tp=tp, sequence_parallel=sequence_parallel)


def both(point: Point) -> list[tuple[Footprint, RankRehearsal]]:
    """(planned, rehearsed) of the first rank of each pipeline stage."""
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
    keeping = Keeping.of(config, point.micro_batches, threads=2)
    return [(footprint(workload, keeping, pp), found) for pp, found in enumerate(rehearsal.ranks)]


def apart(planned: Footprint, rehearsed: RankRehearsal) -> float:
    """Of the peak."""
    return planned.total / rehearsed.peak.total - 1


def table(points: list[Point]) -> None:
    worst = 0.0
    for point in points:
        for planned, rehearsed in both(point):
            off = apart(planned, rehearsed)
            worst = max(worst, abs(off))
            kinds = {
                kind: (planned.by_kind[kind], found)
                for kind, found in rehearsed.peak.by_kind.items()
                if planned.by_kind[kind] != found
            }
            host = (planned.host_bytes, rehearsed.host_bytes)
            more = "" if host[0] == host[1] else f"host {host} "
            print(f"{off:8.2%} {point} rank {rehearsed.rank} {planned.at} {rehearsed.peak.action} {more}{kinds}")
    print(f"{len(points)} points, largest {worst:.2%}")


if __name__ == "__main__":
    table([point for point in POINTS if not sys.argv[1:] or any(name in str(point) for name in sys.argv[1:])])
