"""What a trace is made of. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from zero3d.layout import Layout
from zero3d.pipeline.action import Action, Kind

Sort = Literal["step", "action", "part", "wait", "call", "job"]
QUEUES = ("down", "update", "up")
"""Of offload, in the order in which a bucket goes through them."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a rank did, or had under way, from `start` to `end`, in seconds.

    sort: an action of the schedule, another part of the step, or all of it; a call on an axis from its issue to the
    end of its wait (a send: the issue alone), or that wait, which is time of the actions; a job of a queue, on its own
    thread. step: counted from 1; of a call and a job the one that issued it. axis: of calls and waits. queue: of jobs.
    facts: what else is known.
    """

    what: str
    sort: Sort
    step: int
    start: float
    end: float
    axis: str = ""
    queue: str = ""
    facts: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def action(self) -> Action:
        """Of a span that is one."""
        facts = self.facts
        return Action(Kind(facts["kind"]), int(facts["stage"]), int(facts["micro_batch"]))

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The spans of every rank, by rank; seconds since the first of all, by one clock."""

    layout: Layout
    ranks: Sequence[Sequence[Span]]

    @property
    def steps(self) -> list[int]:
        """The steps that were traced."""
        return sorted({span.step for spans in self.ranks for span in spans})

    def of(self, rank: int, sort: Sort, step: int | None = None) -> Iterator[Span]:
        """One rank's spans of one sort, of one step or of all, in the order in which they ended."""
        return (span for span in self.ranks[rank] if span.sort == sort and step in (None, span.step))
