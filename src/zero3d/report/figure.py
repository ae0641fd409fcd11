"""A figure as plotly's JavaScript takes it, with the words and numbers that say the same. Pure.

Plain dicts: nothing here needs plotly. Colours are Okabe and Ito's, which are told apart with any kind of colour
vision; those of lines stand out from a white page and from a dark one (3 to 1), areas have an outline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

BLUE, VERMILION, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7f7f7f"
"""Of lines and areas."""
ORANGE, SKY, YELLOW = "#e69f00", "#56b4e9", "#f0e442"
"""Of areas."""
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, GREY)
ROW = 26
"""Pixels of a row of bars."""

Trace = dict[str, Any]


def label(text: str) -> str:
    """As plotly takes it, which reads a little HTML in names and texts."""
    return escape(text, quote=False)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells are text; the first column says what a row is of."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """name: its id in the page; told: what it shows, in a sentence, for who does not see it; note: how to read it;
    table: its numbers; wide: it takes a whole row of the page."""

    name: str
    title: str
    told: str
    data: Sequence[Trace]
    layout: Mapping[str, Any]
    table: Table
    note: str = ""
    wide: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "data": list(self.data), "layout": dict(self.layout)}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Part of a stacked row: what is stacked, how much, and what is told of it."""

    name: str
    value: float
    text: str = ""
    base: float | None = None
    colour: str = GREY
    striped: bool = False
    inside: str = ""


@dataclass
class Rows:
    """Horizontal bars, by row from above; of one name and colour one plotly trace, in the order of first use."""

    names: list[str] = field(default_factory=list)
    _traces: dict[tuple[str, str], Trace] = field(default_factory=dict)

    def add(self, row: str, bars: Sequence[Bar]) -> None:
        self.names.append(row)
        for bar in bars:
            trace = self._traces.setdefault((bar.name, bar.colour), _bar_trace(bar, legend=self._is_new(bar.name)))
            trace["y"].append(label(row))
            trace["x"].append(bar.value)
            trace["customdata"].append(label(bar.text))
            if bar.base is not None:
                trace.setdefault("base", []).append(bar.base)
            if bar.inside:
                trace.setdefault("text", []).append(label(bar.inside))

    def _is_new(self, name: str) -> bool:
        return all(known != name for known, _ in self._traces)

    @property
    def data(self) -> list[Trace]:
        return list(self._traces.values())

    def layout(self, title: str, *, mode: str = "stack", **axis: Any) -> dict[str, Any]:
        """`title`, `axis`: of the horizontal one; `mode`: "overlay" where bars have starts of their own."""
        names = [label(one) for one in self.names]
        return {
            "barmode": mode,
            "bargap": 0.25,
            "height": 110 + ROW * len(names),
            "hovermode": "closest",
            "uniformtext": {"mode": "hide", "minsize": 9},  # A number that does not fit is left out.
            "xaxis": {"title": {"text": title}, "rangemode": "tozero", **axis},
            "yaxis": {
                "categoryorder": "array",
                "categoryarray": names,
                "autorange": "reversed",
                "automargin": True,
                "type": "category",
            },
        }


def _bar_trace(bar: Bar, *, legend: bool) -> Trace:
    marker: Trace = {"color": bar.colour, "line": {"width": 0.5, "color": "#555555"}}
    if bar.striped:
        marker["pattern"] = {"shape": "/", "size": 6, "fillmode": "overlay", "fgcolor": "#ffffff", "fgopacity": 0.6}
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(bar.name),
        "legendgroup": label(bar.name),
        "showlegend": legend,
        "marker": marker,
        "y": [],
        "x": [],
        "customdata": [],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
    }
