"""What is known of every step, as curves over steps: loss, speed, norm and learning rate. Pure."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from zero3d.report.contents import Run
from zero3d.report.figure import BLUE, GREEN, GREY, PURPLE, VERMILION, Figure, Table, Trace
from zero3d.report.lines import Step, number

MOST_POINTS = 1500
"""Of a curve; of more steps each point is a mean."""
MOST_ROWS = 12
"""Of a table of steps."""

Value = Callable[[Step], float]


def curves(run: Run) -> list[Figure]:
    """None where no step is known."""
    if not run.metrics.steps:
        return []
    return [_loss(run), _throughput(run), _seconds(run), _norm(run), _rate(run)]


def thin(steps: Sequence[Step], value: Value, most: int = MOST_POINTS) -> tuple[list[int], list[float | None]]:
    """At most `most` points: the last of so many steps that follow each other, and the mean of their finite values
    (None: they have none)."""
    size = max(math.ceil(len(steps) / most), 1)
    places, means = list[int](), list[float | None]()
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        finite = [one for step in part if math.isfinite(one := value(step))]
        places.append(part[-1].number)
        means.append(fmean(finite) if finite else None)
    return places, means


def _loss(run: Run) -> Figure:
    steps = run.metrics.steps
    data = [_line(steps, lambda step: step.loss, "training", BLUE)]
    heldout = number(run.metrics.done.get("heldout_loss")) if run.metrics.done else math.nan
    finite = [step.loss for step in steps if math.isfinite(step.loss)]
    told = f"Training loss goes from {_text(finite[0])} to {_text(finite[-1])} nats per token" if finite else "Training"
    if len(finite) < len(steps):
        told += f"; at {len(steps) - len(finite):,} of {len(steps):,} steps it was not finite"
    if math.isfinite(heldout):
        marker = {"color": VERMILION, "size": 11, "symbol": "diamond"}
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "held out, after the last step",
                "x": [run.metrics.last_step],
                "y": [heldout],
                "marker": marker,
                "hovertemplate": "held out: %{y:.4g}<extra></extra>",
            }
        )
        told += f"; held-out loss is {heldout:.4g} after the last step"
    return _figure(run, "loss", "Loss", f"{told}.", "nats per token", data, lambda step: step.loss, {})


def _throughput(run: Run) -> Figure:
    steps, value = run.metrics.steps, lambda step: step.tokens_per_second
    told = f"The median step makes {_text(_median(steps, value))} tokens per second."
    data = [_line(steps, value, "tokens per second", GREEN)]
    return _figure(run, "throughput", "Throughput", told, "tokens per second", data, value, _FROM_ZERO)


def _seconds(run: Run) -> Figure:
    steps, value = run.metrics.steps, lambda step: step.seconds
    told = f"The median step takes {_text(_median(steps, value))} s, the longest {_text(_most(steps, value))} s."
    return _figure(
        run, "seconds", "Step time", told, "seconds", [_line(steps, value, "seconds", PURPLE)], value, _FROM_ZERO
    )


def _norm(run: Run) -> Figure:
    steps, value = run.metrics.steps, lambda step: step.grad_norm
    skipped = [step.number for step in steps if step.skipped]
    told = f"The median gradient norm is {_text(_median(steps, value))}, the largest {_text(_most(steps, value))}."
    if skipped:
        told += f" {len(skipped)} of the steps updated nothing, the last of them step {skipped[-1]:,}."
    data = [_line(steps, value, "norm before clipping", VERMILION)]
    return _figure(run, "norm", "Gradient norm", told, "L2 norm", data, value, {"type": "log", "dtick": "D2"})


def _rate(run: Run) -> Figure:
    steps, value = run.metrics.steps, lambda step: step.lr
    told = f"The learning rate is {_text(_most(steps, value))} at its highest and {_text(steps[-1].lr)} at last."
    return _figure(
        run, "lr", "Learning rate", told, "", [_line(steps, value, "learning rate", GREY)], value, _FROM_ZERO
    )


def _figure(
    run: Run,
    name: str,
    title: str,
    told: str,
    unit: str,
    data: Sequence[Trace],
    value: Value,
    axis: dict[str, Any],
) -> Figure:
    steps = run.metrics.steps
    rows = [(f"{step.number:,}", _text(value(step))) for step in _some(steps)]
    layout = {
        "height": 280,
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "step"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": unit}, "automargin": True, **axis},
        "shapes": [
            {"type": "line", "x0": place, "x1": place, "yref": "paper", "y0": 0, "y1": 1, "line": _DOTTED}
            for place in run.metrics.resumed
        ],
        "showlegend": len(data) > 1,
    }
    size = math.ceil(len(steps) / MOST_POINTS)
    notes = [f"Each point is the mean of {size} steps."] if size > 1 else []
    if run.metrics.resumed:
        notes.append("A dotted line: the run went on from a checkpoint.")
    some = f"{title} at {len(rows)} of {len(steps):,} steps" if len(rows) < len(steps) else f"{title} at each step"
    heads = ("step", unit or title.lower())
    table = Table(caption=some, heads=heads, rows=rows)
    return Figure(
        name=name,
        title=title,
        told=told,
        data=data,
        layout=layout,
        table=table,
        note=" ".join(notes),
        wide=len(data) > 1,
    )


_FROM_ZERO = {"rangemode": "tozero"}
_DOTTED = {"color": GREY, "width": 1.5, "dash": "dot"}


def _line(steps: Sequence[Step], value: Value, name: str, colour: str) -> Trace:
    places, means = thin(steps, value)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(places) < 30 else "lines",
        "name": name,
        "x": places,
        "y": means,
        "line": {"color": colour, "width": 2},
        "hovertemplate": "%{y:.4g}<extra></extra>",
    }


def _some(steps: Sequence[Step]) -> list[Step]:
    """The first, the last, and some between them."""
    count = min(len(steps), MOST_ROWS)
    return [steps[round(index * (len(steps) - 1) / max(count - 1, 1))] for index in range(count)]


def _median(steps: Sequence[Step], value: Value) -> float:
    finite = [one for step in steps if math.isfinite(one := value(step))]
    return median(finite) if finite else math.nan


def _most(steps: Sequence[Step], value: Value) -> float:
    return max((one for step in steps if math.isfinite(one := value(step))), default=math.nan)


def _text(value: float) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
