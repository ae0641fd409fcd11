"""A step in time: the schedule on paper or at mean times, and as it was measured where the run has a trace. Pure.

Rows are ranks of the first pipeline, those that are at index 0 on dp and tp; below a rank with offload are its queues.
"""

from collections.abc import Iterator, Sequence

from zero3d.errors import Zero3dError
from zero3d.pipeline.action import Kind
from zero3d.pipeline.picture import NAMES, colour
from zero3d.pipeline.simulate import Run as Placed
from zero3d.pipeline.simulate import Timeline, simulate
from zero3d.planner.bubble import actions
from zero3d.report.contents import Run
from zero3d.report.figure import Bar, Figure, Rows, Table
from zero3d.trace.queue_rows import COLOURS, Job, jobs
from zero3d.trace.span import QUEUES, Trace
from zero3d.trace.timelines import began, measured, middle_step, pipeline_of, planned

MOST_BARS = 4000
"""Of a figure; more rows are left out, and that is told."""
TELLS = {kind: colour(kind, shade) for kind, shade in zip(Kind, (0.75, 0.55, 0.35, 0.2), strict=True)}


def gantt(run: Run, problems: list[str]) -> Figure | None:
    """At mean times and measured in one figure and one scale; without a trace the schedule of a pipeline on paper. What
    cannot be drawn becomes one of the `problems`."""
    try:
        if run.trace:
            return _traced(run.trace)
        if run.config and run.layout and run.layout.pp > 1:
            return _on_paper(simulate(actions(run.config)))
    except (Zero3dError, KeyError, ValueError, IndexError, AssertionError) as error:  # Who knows what the file has.
        problems.append(f"The timeline cannot be drawn: {error}.")
    return None


def _traced(trace: Trace) -> Figure:
    step = middle_step(trace)
    plan, found = planned(trace), measured(trace, step)
    queued = jobs(trace, step)
    rows, drawn = Rows(), 0
    table: list[list[str]] = []
    for side, timeline in (("at mean times", plan), ("measured", found)):
        for index, (rank, runs) in enumerate(zip(pipeline_of(trace), timeline.ranks, strict=True)):
            drawn += len(runs)
            table.append(_row(f"rank {rank}, {side}", runs, timeline, "ms"))
            if drawn > MOST_BARS:
                continue
            bars = [_bar(one, "ms") for one in runs]
            more = side == "measured"
            rows.add(f"rank {rank}, {side}", [*bars, *(_updates(trace, rank, step) if more else ())])
            for queue in QUEUES if more and any(queued) else ():
                rows.add(f"rank {rank}, {queue}", [_job(one) for one in queued[index] if one.queue == queue])
    told = (
        f"Step {step}: {found.makespan:.4g} ms measured with a bubble of {found.bubble:.1%}, "
        f"{plan.makespan:.4g} ms with {plan.bubble:.1%} by the schedule at mean times."
    )
    return Figure(
        name="timeline",
        title="The schedule at mean times and the measured step",
        told=told,
        data=rows.data,
        layout=rows.layout("milliseconds from the first action", mode="overlay"),
        table=Table(caption="Ranks of the first pipeline", heads=_HEADS, rows=table),
        note="At mean times: the schedule with the mean time of each kind of action in each stage. Measured: the "
        "traced step that took neither longest nor shortest. Empty: idle, or waiting for another stage. The number in "
        "a cell is its micro-batch." + (" More rows than fit are left out." if drawn > MOST_BARS else ""),
        wide=True,
    )


def _on_paper(timeline: Timeline) -> Figure:
    rows, drawn = Rows(), 0
    table = []
    for rank, runs in enumerate(timeline.ranks):
        drawn += len(runs)
        table.append(_row(f"pp {rank}", runs, timeline, ""))
        if drawn <= MOST_BARS:
            rows.add(f"pp {rank}", [_bar(one, "") for one in runs])
    return Figure(
        name="timeline",
        title="The schedule on paper",
        told=f"On paper a step takes {timeline.makespan:g} units of time, with a bubble of {timeline.bubble:.1%}.",
        data=rows.data,
        layout=rows.layout("units of time", mode="overlay"),
        table=Table(caption="Pipeline ranks", heads=_HEADS, rows=table),
        note="The schedule alone, in units of one forward of a stage; a backward takes two. A run with --trace has the "
        "measured timeline too." + (" More rows than fit are left out." if drawn > MOST_BARS else ""),
        wide=True,
    )


_HEADS = ("rank", "actions", "at work", "idle")


def _row(name: str, runs: Sequence[Placed], timeline: Timeline, unit: str) -> list[str]:
    busy = sum(one.end - one.start for one in runs)
    idle = timeline.makespan - busy
    return [name, f"{len(runs)}", f"{busy:.4g} {unit}".rstrip(), f"{idle:.4g} {unit}".rstrip()]


def _bar(one: Placed, unit: str) -> Bar:
    action = one.action
    return Bar(
        name=NAMES[action.kind],
        value=one.end - one.start,
        base=one.start,
        text=f"{action.full}, {one.start:.4g} to {one.end:.4g} {unit}".rstrip(),
        colour=TELLS[action.kind],
        inside=str(action.micro_batch),
    )


def _updates(trace: Trace, rank: int, step: int) -> Iterator[Bar]:
    zero = began(trace, step)
    for one in trace.of(rank, "part", step):
        start, end = (one.start - zero) * 1e3, (one.end - zero) * 1e3
        told = f"{one.what}, {start:.4g} to {end:.4g} ms"
        yield Bar(name=one.what, value=end - start, base=start, text=told, colour=COLOURS["update"], inside=" ")


def _job(one: Job) -> Bar:
    of = "" if one.own else ", of another step"
    return Bar(
        name=f"{one.queue} (queue)",
        value=one.end - one.start,
        base=one.start,
        text=f"{one.what}{of}, {one.start:.4g} to {one.end:.4g} ms",
        colour=COLOURS[one.queue],
        striped=True,
        inside=" ",
    )
