"""trace.json read back as the `Trace` that `trace.chrome` wrote, and what each rank's seconds went into. Pure."""

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, get_args

from zero3d.errors import DataError
from zero3d.layout import AXES, Layout
from zero3d.pipeline.action import Kind
from zero3d.pipeline.picture import NAMES
from zero3d.trace.span import QUEUES, Sort, Span, Trace

RANK = re.compile(r"rank (\d+) \(dp (\d+), tp (\d+), pp (\d+)\)")
SORTS = get_args(Sort)
OTHER = "other"
"""Of a step what is neither an action, nor the update, nor a wait."""


def read_trace(text: str) -> Trace:
    """The trace in a file's text. DataError: it is none of ours, or is cut short."""
    try:
        events = json.loads(text)["traceEvents"]
        places = {int(match[1]): match for one in events if (match := _rank(one))}
        sizes = [1 + max(int(match[axis]) for match in places.values()) for axis in (2, 3, 4)]
        layout = Layout(dp=sizes[0], tp=sizes[1], pp=sizes[2])
        if sorted(places) != list(range(layout.world)):
            raise ValueError("ranks are missing")
        threads = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one.get("name") == "thread_name"}
        ranks: list[list[Span]] = [[] for _ in range(layout.world)]
        for one in events:
            if one.get("ph") == "X":
                ranks[one["pid"]].append(_span(one, threads[one["pid"], one["tid"]]))
        trace = Trace(layout=layout, ranks=ranks)
        if not all(any(trace.of(rank, "action")) for rank in range(layout.world)):
            raise ValueError("no action in it")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DataError(
            f"trace.json is not as --trace writes it: {error}",
            hint="Train again with --trace, or remove the file from the run's folder.",
        ) from error
    return trace


def _rank(event: Mapping[str, Any]) -> "re.Match[str] | None":
    return RANK.match(str(event["args"]["name"])) if event.get("name") == "process_name" else None


def _span(event: Mapping[str, Any], thread: str) -> Span:
    """Times of the file are in microseconds."""
    facts = dict(event["args"])
    sort, step, axis = event["cat"], int(facts.pop("step")), str(facts.pop("axis", ""))
    if sort not in SORTS:
        raise ValueError(f"a span of sort {sort!r}")
    start, taken = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    if not (math.isfinite(start) and math.isfinite(taken)):
        raise ValueError("a time that is not finite")
    queue = thread if sort == "job" and thread in QUEUES else ""
    span = Span(
        what=str(event["name"]),
        sort=sort,
        step=step,
        start=start,
        end=start + taken,
        axis=axis,
        queue=queue,
        facts=facts,
    )
    if sort == "action":
        assert span.action  # A kind that there is, or a ValueError.
    return span


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The seconds of a rank's step, the mean over traced steps, by what they went into: kinds of action and other
    parts without the waits within them, waits by axis, and the rest."""

    rank: int
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def share(self, name: str) -> float:
        """Of the step."""
        return self.seconds.get(name, 0.0) / (self.total or 1.0)


def spent(trace: Trace) -> list[Spent]:
    """Of every rank, in the order: actions, update, waits, other."""
    found = []
    for rank in range(trace.layout.world):
        by_step = [_of_step(trace, rank, step) for step in trace.steps]
        names = sorted({name for one in by_step for name in one}, key=_order)
        means = {name: fmean(one.get(name, 0.0) for one in by_step) for name in names}
        found.append(Spent(rank=rank, seconds={name: seconds for name, seconds in means.items() if seconds > 0}))
    return found


def is_wait(name: str) -> bool:
    """Whether a rank stood still in it."""
    return name.startswith("wait")


def _of_step(trace: Trace, rank: int, step: int) -> dict[str, float]:
    waits = list(_apart(sorted(trace.of(rank, "wait", step), key=lambda one: (one.start, -one.end))))
    taken: dict[str, float] = defaultdict(float)
    ends = [end for _, end, _ in waits]
    for start, end, axis in waits:
        taken[f"wait for {axis}"] += end - start
    for span in [*trace.of(rank, "action", step), *trace.of(rank, "part", step)]:
        name = NAMES[span.action.kind] if span.sort == "action" else span.what
        taken[name] += max(span.seconds - _within(span, waits, ends), 0.0)
    whole = sum(one.seconds for one in trace.of(rank, "step", step))
    taken[OTHER] = max(whole - sum(taken.values()), 0.0)
    return dict(taken)


def _within(span: Span, waits: Sequence[tuple[float, float, str]], ends: Sequence[float]) -> float:
    """Seconds of the span that are waits, which are in order and apart; `ends`: of them."""
    total = 0.0
    for start, end, _ in waits[bisect_right(ends, span.start) :]:
        if start >= span.end:
            break
        total += min(end, span.end) - max(start, span.start)
    return total


def _apart(waits: Sequence[Span]) -> Iterator[tuple[float, float, str]]:
    """Start, end and axis of each; where one lies in another the outer one alone counts."""
    free = 0.0
    for one in waits:
        start = max(one.start, free)
        if one.end > start:
            yield start, one.end, one.axis
            free = one.end


def _order(name: str) -> tuple[int, int]:
    for group, names in enumerate(([NAMES[kind] for kind in Kind], [], [f"wait for {axis}" for axis in AXES])):
        if name in names:
            return group, names.index(name)
    return (3 if name == OTHER else 1), 0
