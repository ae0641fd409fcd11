"""The queues of offload as rows of a picture, below those of their rank. Pure.

rank 0 | F0 | F1 | B0 | B1 | update |
down                 | n |  ...  |
update     late, paler                 | a | b | ... |
up                                         | a | b | ... |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from zero3d.pipeline.picture import LABEL, MARGIN
from zero3d.trace.span import QUEUES, Trace
from zero3d.trace.timelines import began, pipeline_of

THIN = 16
"""Pixels from one row to the next."""
COLOURS = {"down": "#f0b78f", "update": "#c9b8e8", "up": "#8fcfc0"}
PALE = 0.4
"""Opacity of jobs of another step."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """start, end: in milliseconds of the measured timeline; own: of the step that is drawn."""

    queue: str
    what: str
    start: float
    end: float
    own: bool


def num_rows(trace: Trace) -> int:
    """Below each rank: none without offload."""
    return len(QUEUES) if any(span.sort == "job" for spans in trace.ranks for span in spans) else 0


def jobs(trace: Trace, step: int) -> list[list[Job]]:
    """Of each rank of the first pipeline: all that were at work from the start of the step's first action until the
    last job of the step had ended, whatever step they were of."""
    zero = began(trace, step)
    found = [
        [
            Job(
                queue=span.queue,
                what=span.what,
                start=max(span.start - zero, 0.0) * 1e3,
                end=(span.end - zero) * 1e3,
                own=span.step == step,
            )
            for span in trace.of(rank, "job")
            if span.end > zero
        ]
        for rank in pipeline_of(trace)
    ]
    last = max((job.end for own in found for job in own if job.own), default=0.0)
    return [[job for job in own if job.end <= last] for own in found]


def svg_queues(jobs: Sequence[Job], y: float, scale: float, end: float) -> Iterator[str]:
    """The rows of one rank, the first one's upper edge at `y`; each a grey bar until `end`, and its jobs."""
    for row, queue in enumerate(QUEUES):
        top = y + row * THIN
        yield f'<text x="{MARGIN}" y="{top + THIN * 0.7:.1f}" font-size="10" fill="#666">{queue}</text>'
        yield f'<rect x="{LABEL}" y="{top + 1}" width="{end * scale:.1f}" height="{THIN - 2}" fill="#f7f7f7"/>'
        for job in jobs:
            if job.queue == queue:
                told = f"{queue} of {escape(job.what)}{'' if job.own else ', another step'}"
                yield (
                    f"<g><title>{told}: {job.start:g} to {job.end:g}</title>"
                    f'<rect x="{LABEL + job.start * scale:.1f}" y="{top + 1}" '
                    f'width="{max((job.end - job.start) * scale, 1):.1f}" height="{THIN - 2}" stroke="white" '
                    f'stroke-width="0.3" fill="{COLOURS[queue]}" opacity="{1 if job.own else PALE}"/></g>'
                )
