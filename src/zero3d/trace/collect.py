"""Brings together what all ranks recorded, by one clock."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from zero3d.comm.texts import everyones_text
from zero3d.contracts import Axis
from zero3d.layout import Layout
from zero3d.trace.span import Span, Trace

ROUNDS = 15
"""How often ranks meet to compare clocks; the median forgets a round in which one of them was late."""


def collect(spans: Sequence[Span], layout: Layout, everyone: Axis, device: torch.device) -> Trace:
    """The trace of all ranks, on each of them. Collective."""
    ahead = _ahead(everyone, device)
    texts = everyones_text(json.dumps([asdict(span) for span in spans]), everyone, device, "what was traced")
    ranks = [
        [_earlier(Span(**one), seconds) for one in json.loads(text)] for text, seconds in zip(texts, ahead, strict=True)
    ]
    first = min((span.start for one in ranks for span in one), default=0.0)
    return Trace(layout=layout, ranks=[[_earlier(span, first) for span in one] for one in ranks])


def _ahead(everyone: Axis, device: torch.device) -> list[float]:
    """How many seconds each rank's clock is ahead of rank 0's: all leave a barrier at about the same time."""
    mine: list[Any] = []
    for _ in range(ROUNDS):
        meeting = torch.zeros(1, device=device)
        everyone.all_reduce(meeting, "clocks").wait()
        meeting.item()
        mine.append(perf_counter())
    stamps = torch.empty(everyone.size * ROUNDS, dtype=torch.float64, device=device)
    everyone.all_gather(stamps, torch.tensor(mine, dtype=torch.float64, device=device), "clocks").wait()
    rows = stamps.view(everyone.size, ROUNDS)
    return [median((row - rows[0]).tolist()) for row in rows]


def _earlier(span: Span, seconds: float) -> Span:
    return replace(span, start=span.start - seconds, end=span.end - seconds)
