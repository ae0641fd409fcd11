"""One traced step drawn below its plan, in the manner of `zero3d show schedule --picture` and in one scale. Pure."""

from collections.abc import Iterator, Sequence
from html import escape

from zero3d.pipeline.action import Kind
from zero3d.pipeline.picture import CELL, LABEL, MARGIN, ROW, svg_legend, svg_row, svg_times
from zero3d.pipeline.simulate import Timeline
from zero3d.trace.queue_rows import COLOURS, THIN, Job, jobs, num_rows, svg_queues
from zero3d.trace.span import Trace
from zero3d.trace.timelines import began, measured, middle_step, pipeline_of, planned

LEAST = 1000
"""Pixels of the longer of the two, at least; where there are many actions it is wider."""
UPDATE = COLOURS["update"]


def svg(trace: Trace, title: str) -> str:
    """A picture of the traced step that took neither longest nor shortest; times are in milliseconds. With offload each
    rank has its queues below it, until the step's last job has ended."""
    step = middle_step(trace)
    plan, found = planned(trace), measured(trace, step)
    updates, rows, queued = _updates(trace, step), num_rows(trace), jobs(trace, step)
    end = max(found.makespan, *(end for _, end in updates))
    last = max([end, *(job.end for own in queued for job in own)])
    longest = max(plan.makespan, last)
    scale = max(LEAST, CELL * max(map(len, found.ranks))) / longest
    below = 2.5 * ROW
    panel = below + len(plan.ranks) * ROW
    pitch = ROW + rows * THIN
    bottom = 2 * ROW + panel + below + len(plan.ranks) * pitch
    width, height = LABEL + longest * scale + 2 * MARGIN, bottom + 2.5 * ROW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            'font-family="system-ui, sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{MARGIN}" y="{ROW}" font-size="14" font-weight="bold" fill="#222">{escape(title)}</text>',
            *_heading(plan, "planned with the mean time of each kind and stage", 2 * ROW),
            *_ranks(trace, plan, 3 * ROW, ROW, scale, plan.makespan),
            *svg_times(plan.makespan, 3 * ROW + len(plan.ranks) * ROW + MARGIN, scale),
            *_heading(found, f"measured, step {step}", 2 * ROW + panel),
            *_ranks(trace, found, 3 * ROW + panel, pitch, scale, end),
            *_drawn(updates, 3 * ROW + panel, pitch, scale),
            *_queues(queued if rows else (), 4 * ROW + panel, pitch, scale, last),
            *svg_times(last, 3 * ROW + panel + len(plan.ranks) * pitch + MARGIN, scale),
            *_legend(plan, bottom, offloads=rows > 0),
            "</svg>",
            "",
        ]
    )


def _heading(timeline: Timeline, what: str, y: float) -> Iterator[str]:
    told = f"{what}: {timeline.makespan:.4g} ms, bubble {timeline.bubble:.1%}"
    yield f'<text x="{MARGIN}" y="{y + ROW * 0.66:.1f}" fill="#222">{escape(told)}</text>'


def _ranks(trace: Trace, timeline: Timeline, y: float, pitch: float, scale: float, end: float) -> Iterator[str]:
    """`pitch`: pixels from one rank to the next."""
    for row, (rank, runs) in enumerate(zip(pipeline_of(trace), timeline.ranks, strict=True)):
        yield from svg_row(rank, runs, y + row * pitch, scale, end)


def _queues(queued: Sequence[Sequence[Job]], y: float, pitch: float, scale: float, end: float) -> Iterator[str]:
    for row, own in enumerate(queued):
        yield from svg_queues(own, y + row * pitch, scale, end)


def _updates(trace: Trace, step: int) -> list[tuple[float, float]]:
    """When each rank's began and ended, in milliseconds of the measured timeline; zeros where there was none."""
    zero, none = began(trace, step), (0.0, 0.0)
    found = []
    for rank in pipeline_of(trace):
        updates = (part for part in trace.of(rank, "part", step) if part.what == "update")
        found.append(next((((one.start - zero) * 1e3, (one.end - zero) * 1e3) for one in updates), none))
    return found


def _drawn(updates: Sequence[tuple[float, float]], y: float, pitch: float, scale: float) -> Iterator[str]:
    for row, (start, end) in enumerate(updates):
        yield (
            f"<g><title>update, {start:g} to {end:g}</title>"
            f'<rect x="{LABEL + start * scale:.1f}" y="{y + row * pitch + 1}" width="{(end - start) * scale:.1f}" '
            f'height="{ROW - 2}" rx="2" stroke="white" fill="{UPDATE}"/></g>'
        )


def _legend(timeline: Timeline, y: float, *, offloads: bool) -> Iterator[str]:
    found = {run.action.kind for runs in timeline.ranks for run in runs}
    kinds = [kind for kind in Kind if kind in found]
    yield from svg_legend(kinds, y)
    x = LABEL + 170 * len(kinds) + MARGIN
    yield f'<rect x="{x}" y="{y}" width="18" height="18" rx="2" fill="{UPDATE}"/>'
    yield f'<text x="{x + 24}" y="{y + 13}" fill="#222">update</text>'
    notes = "Milliseconds from the first action. Grey: idle, or waiting for another stage."
    if any(len({run.action.stage for run in runs}) > 1 for runs in timeline.ranks):
        notes += " Darker: a later stage of the rank."
    if offloads:
        notes += " Below a rank: its queues, and paler what they did for another step."
    yield f'<text x="{LABEL}" y="{y + 1.5 * ROW}" fill="#666">{notes}</text>'
