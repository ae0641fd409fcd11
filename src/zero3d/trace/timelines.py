"""A traced step as a timeline, and the same schedule as it is planned with what its actions cost. Pure.

Both are of one pipeline: the ranks that differ on pp alone. Times are in milliseconds.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from zero3d.layout import Place
from zero3d.pipeline.action import Kind
from zero3d.pipeline.simulate import Costs, Run, Timeline, simulate
from zero3d.trace.span import Span, Trace


def pipeline_of(trace: Trace) -> list[int]:
    """The ranks of the first pipeline, by stage: those with index 0 on dp and tp."""
    return [trace.layout.rank(Place(0, 0, index)) for index in range(trace.layout.pp)]


def began(trace: Trace, step: int) -> float:
    """When the first action of the first pipeline began, in seconds of the trace."""
    return min(span.start for rank in pipeline_of(trace) for span in trace.of(rank, "action", step))


def measured(trace: Trace, step: int) -> Timeline:
    """One traced step from the start of its first action. An action begins when what it needs of other stages is there:
    a rank that waits for it is idle. (It does wait within the action for what comes over dp and tp.)"""
    zero = began(trace, step)
    return Timeline([_later(_runs(trace, rank, step), zero) for rank in pipeline_of(trace)])


def planned(trace: Trace) -> Timeline:
    """The schedule of the traced steps on paper. Each action costs what those of its kind and stage took in the mean
    over traced steps and ranks, waits for other stages left out; what is sent arrives at once."""
    step = trace.steps[0]
    order = [[run.action for run in _runs(trace, rank, step)] for rank in pipeline_of(trace)]
    return simulate(order, costs(trace))


def middle_step(trace: Trace) -> int:
    """The traced step that took neither longest nor shortest."""
    by_time = sorted(trace.steps, key=lambda step: measured(trace, step).makespan)
    return by_time[(len(by_time) - 1) // 2]


def costs(trace: Trace) -> Costs:
    """Mean milliseconds of each kind by stage. A whole backward counts as one of inputs where none is split."""
    taken: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank in range(trace.layout.world):
        for step in trace.steps:
            for run in _runs(trace, rank, step):
                taken[run.action.kind, run.action.stage].append((run.end - run.start) * 1e3)
    means = {key: fmean(values) for key, values in taken.items()}
    stages = range(1 + max(stage for _, stage in means))
    whole = [means.get((Kind.BACKWARD, stage), 0.0) for stage in stages]
    return Costs(
        forward=[means[Kind.FORWARD, stage] for stage in stages],
        input_backward=[means.get((Kind.INPUT, stage), whole[stage]) for stage in stages],
        weight_backward=[means.get((Kind.WEIGHT, stage), 0.0) for stage in stages],
    )


def _runs(trace: Trace, rank: int, step: int) -> list[Run]:
    """In seconds of the trace."""
    waits = [span for span in trace.of(rank, "wait", step) if span.axis == "pp"]
    return [Run(span.action, _ready(span, waits), span.end) for span in trace.of(rank, "action", step)]


def _ready(action: Span, waits: Sequence[Span]) -> float:
    return max((wait.end for wait in waits if action.start <= wait.start < action.end), default=action.start)


def _later(runs: Sequence[Run], zero: float) -> list[Run]:
    return [Run(run.action, (run.start - zero) * 1e3, (run.end - zero) * 1e3) for run in runs]
