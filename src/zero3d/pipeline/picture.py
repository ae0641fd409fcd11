"""A timeline as a drawing: rows are ranks, time runs to the right. Pure.

`lines` draws it in characters, `svg` as a picture. A cell shows its micro-batch; its colour is the kind of the action,
and the darker it is the later is its stage among those of the rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from zero3d.pipeline.action import Kind, written
from zero3d.pipeline.simulate import Run, Timeline

COLOURS = {
    Kind.FORWARD: ((191, 219, 254), (59, 110, 200)),
    Kind.BACKWARD: ((187, 235, 200), (40, 130, 85)),
    Kind.INPUT: ((176, 232, 232), (25, 120, 135)),
    Kind.WEIGHT: ((254, 224, 170), (205, 120, 20)),
}
"""Red, green and blue of the first stage of a rank, and of its last."""
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward of inputs",
    Kind.WEIGHT: "backward of weights",
}
IDLE = "·"
CELL, ROW, MARGIN, LABEL, DIGIT = 26, 26, 12, 58, 8
"""In pixels; CELL is the width of the shortest action."""


@dataclass(frozen=True)
class Cell:
    """A piece of a line; `kind` is None where the rank is idle, `shade` is that of its stage, 0 to 1."""

    text: str
    kind: Kind | None = None
    shade: float = 0.0


@dataclass(frozen=True)
class _Block:
    """An action in columns: the first, and the one after its last."""

    run: Run
    text: str
    shade: float
    first: int
    end: int


def lines(timeline: Timeline, width: int) -> list[list[list[Cell]]]:
    """Bands of at most `width` characters (but one column at least); a band has one list of cells for each rank.

    The shortest action is one column wide, the others as many times that as they take.
    """
    texts = written([run.action for run in runs] for runs in timeline.ranks)
    rows = [list(_blocks(*row, _shortest(timeline))) for row in zip(timeline.ranks, texts, strict=True)]
    wide = 1 + max((len(block.text) for row in rows for block in row), default=0)
    columns = max((block.end for row in rows for block in row), default=0)
    per_band = max(width // wide, 1)
    return [
        [list(_cells(row, first, min(first + per_band, columns), wide)) for row in rows]
        for first in range(0, columns, per_band)
    ]


def _blocks(runs: Sequence[Run], texts: Sequence[str], unit: float) -> Iterator[_Block]:
    free = 0
    shades = _shades(runs)
    for run, text in zip(runs, texts, strict=True):
        first = max(round(run.start / unit), free)
        free = first + max(round((run.end - run.start) / unit), 1)
        yield _Block(run, text, shades[run.action.stage], first, free)


def _cells(row: Sequence[_Block], first: int, end: int, wide: int) -> Iterator[Cell]:
    """The columns from `first` up to `end` of one rank."""
    at = first
    for block in row:
        start, stop = max(block.first, first), min(block.end, end)
        if start >= stop:
            continue
        if start > at:
            yield Cell(IDLE.ljust(wide) * (start - at))
        text = block.text if block.first >= first else ""
        yield Cell(f"{text.ljust((stop - start) * wide - 1, '─')} ", block.run.action.kind, block.shade)
        at = stop
    if at < end:
        yield Cell(IDLE.ljust(wide) * (end - at))


def _shades(runs: Sequence[Run]) -> dict[int, float]:
    """Of each stage of a rank: 0 for its first, 1 for its last."""
    stages = sorted({run.action.stage for run in runs})
    return {stage: number / max(len(stages) - 1, 1) for number, stage in enumerate(stages)}


def svg(timeline: Timeline, title: str) -> str:
    """A picture of the whole timeline, with its title, a legend and a row of times below."""
    scale = CELL / _shortest(timeline)
    width = LABEL + timeline.makespan * scale + MARGIN
    bottom = 2 * ROW + MARGIN + len(timeline.ranks) * ROW
    kinds = [kind for kind in Kind if any(run.action.kind is kind for runs in timeline.ranks for run in runs)]
    width = max(width, LABEL + 170 * len(kinds) + 200, LABEL + 7.5 * len(title))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + 3 * ROW:.0f}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="{ROW}" font-size="14" font-weight="bold" fill="#222">{escape(title)}</text>',
    ]
    for rank, runs in enumerate(timeline.ranks):
        parts += svg_row(rank, runs, 2 * ROW + rank * ROW, scale, timeline.makespan)
    parts += svg_times(timeline.makespan, bottom, scale)
    parts += svg_legend(kinds, bottom + 1.5 * ROW)
    if any(max(_shades(runs).values(), default=0) for runs in timeline.ranks):
        x, y = LABEL + 170 * len(kinds), bottom + 1.5 * ROW + 13
        parts.append(f'<text x="{x}" y="{y}" fill="#222">darker: a later stage of the rank</text>')
    return "\n".join([*parts, "</svg>", ""])


def svg_legend(kinds: Sequence[Kind], y: float) -> Iterator[str]:
    for number, kind in enumerate(kinds):
        x = LABEL + 170 * number
        yield f'<rect x="{x}" y="{y}" width="18" height="18" rx="2" fill="{colour(kind, 0)}"/>'
        yield f'<text x="{x + 24}" y="{y + 13}" fill="#222">{kind.value}: {NAMES[kind]}</text>'


def svg_row(rank: int, runs: Sequence[Run], y: float, scale: float, makespan: float) -> Iterator[str]:
    """One rank: a grey bar as long as the whole, and its actions, with their numbers where there is room for them."""
    shades = _shades(runs)
    yield f'<text x="{MARGIN}" y="{y + ROW * 0.66:.1f}" fill="#222">rank {rank}</text>'
    yield (f'<rect x="{LABEL}" y="{y + 1}" width="{makespan * scale:.1f}" height="{ROW - 2}" fill="#f0f0f0"/>')
    for run in runs:
        shade = shades[run.action.stage]
        x, wide = LABEL + run.start * scale, (run.end - run.start) * scale
        ink = "white" if shade > 0.5 else "#111"
        number = str(run.action.micro_batch)
        yield (
            f"<g><title>{run.action.full}: {NAMES[run.action.kind]} of micro-batch {run.action.micro_batch} in stage "
            f"{run.action.stage}, {run.start:g} to {run.end:g}</title>"
            f'<rect x="{x:.1f}" y="{y + 1}" width="{wide:.1f}" height="{ROW - 2}" rx="2" stroke="white" '
            f'fill="{colour(run.action.kind, shade)}"/>'
            f'<text x="{x + wide / 2:.1f}" y="{y + ROW * 0.66:.1f}" text-anchor="middle" fill="{ink}">'
            f"{number if wide >= DIGIT * len(number) else ''}</text></g>"
        )


def svg_times(makespan: float, y: float, scale: float) -> Iterator[str]:
    """Marks at round times, at least 50 pixels apart."""
    least = 50 / scale
    power = 10.0 ** floor(log10(least))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= least)
    for number in range(int(makespan / step) + 1):
        yield (
            f'<text x="{LABEL + number * step * scale:.1f}" y="{y + 8}" text-anchor="middle" font-size="10" '
            f'fill="#666">{number * step:g}</text>'
        )


def colour(kind: Kind, shade: float) -> str:
    """As #rrggbb."""
    light, dark = COLOURS[kind]
    return "#" + "".join(f"{round(a + (b - a) * shade):02x}" for a, b in zip(light, dark, strict=True))


def _shortest(timeline: Timeline) -> float:
    lengths = [run.end - run.start for runs in timeline.ranks for run in runs if run.end > run.start]
    return min(lengths, default=1.0)
