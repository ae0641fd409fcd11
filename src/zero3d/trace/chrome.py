"""A trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open. Pure.

A process is a rank. Its first thread has steps, actions, the update and, within them, waits; of a run with offload each
queue has a thread of jobs; then each axis has a thread of calls, and further ones where several are under way at a
time, as slices of one thread must not overlap. Arrows lead from sends to what receives them.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from zero3d.layout import AXES
from zero3d.trace.span import QUEUES, Span, Trace

Event = dict[str, object]


def chrome(trace: Trace) -> str:
    """The text of a JSON file. Times are in microseconds."""
    arrows = _sent_and_received(trace)
    events = [event for rank in range(trace.layout.world) for event in _rank(trace, rank, arrows)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _sent_and_received(trace: Trace) -> dict[int, Event]:
    """The arrow at a span, by the span's `id`: from the one send of its text to the one receive of it, in a step and
    between ranks that differ on that axis alone."""
    found: dict[tuple[object, ...], list[Span]] = defaultdict(list)
    for rank in range(trace.layout.world):
        for axis in AXES:
            peers = trace.layout.peers(rank, axis)
            for span in trace.of(rank, "call"):
                if span.axis == axis and span.what in ("send", "recv"):
                    found[span.step, axis, peers, span.facts["label"]].append(span)
    pairs = [one for one in found.values() if sorted(span.what for span in one) == ["recv", "send"]]
    arrows: dict[int, Event] = {}
    for number, pair in enumerate(pairs):
        for span in pair:
            about = {"name": "sent", "cat": "sent", "id": number}
            arrows[id(span)] = {**about, "ph": "s"} if span.what == "send" else {**about, "ph": "f", "bp": "e"}
    return arrows


def _rank(trace: Trace, rank: int, arrows: dict[int, Event]) -> Iterator[Event]:
    place = trace.layout.place(rank)
    yield from _named("process", rank, 0, f"rank {rank} (dp {place.dp}, tp {place.tp}, pp {place.pp})", rank)
    for number, (name, spans) in enumerate(_threads(trace.ranks[rank])):
        thread = number + 1
        yield from _named("thread", rank, thread, name, number)
        for span in spans:
            start, end = round(span.start * 1e6, 3), round(span.end * 1e6, 3)
            at = {"pid": rank, "tid": thread}
            yield {
                "name": span.what,
                "cat": span.sort,
                "ph": "X",
                "ts": start,
                "dur": round(end - start, 3),
                **at,
                "args": {"step": span.step, **({"axis": span.axis} if span.axis else {}), **span.facts},
            }
            if id(span) in arrows:
                # An arrow belongs to the slice that it lies in, and its end does not lie in it.
                inside = start if span.what == "send" else max(start, round(end - 0.001, 3))
                yield {**arrows[id(span)], "ts": inside, **at}


def _named(what: str, process: int, thread: int, name: str, place: int) -> Iterator[Event]:
    """The name of a process or thread, and its place from above."""
    about = {"ph": "M", "pid": process, "tid": thread, "ts": 0}
    yield {"name": f"{what}_name", **about, "args": {"name": name}}
    yield {"name": f"{what}_sort_index", **about, "args": {"sort_index": place}}


def _threads(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    yield "actions", _outer_first(span for span in spans if span.sort not in ("call", "job"))
    for queue in QUEUES:
        if jobs := _outer_first(span for span in spans if span.queue == queue):
            yield queue, jobs
    for axis in AXES:
        rows: list[list[Span]] = []
        for span in _outer_first(span for span in spans if span.sort == "call" and span.axis == axis):
            free = next((row for row in rows if row[-1].end <= span.start), None)
            if free is None:
                rows.append([span])
            else:
                free.append(span)
        for number, row in enumerate(rows):
            yield axis if number == 0 else f"{axis} +{number}", row


def _outer_first(spans: Iterator[Span]) -> list[Span]:
    """In the order in which they began; what lies within another after it."""
    return sorted(spans, key=lambda span: (span.start, -span.end))
