"""What `zero3d show layout` shows people: a grid of ranks, what tensor parallelism cuts, ZeRO's parts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from zero3d.cli.checks import predicted
from zero3d.cli.offload_tables import home_of, offloads, what_is_offloaded
from zero3d.cli.style import count
from zero3d.cli.tables import KINDS, axes_text, blocks_text, layout_of, part_of, schedule_text, who_holds_what
from zero3d.config import Config
from zero3d.layout import Layout, Place
from zero3d.planner.memory import ModelStates

if TYPE_CHECKING:
    from zero3d.outline import Outline
    from zero3d.params import ParamInfo

MOST_ROWS = 8
"""Rows of dp in the grid for each index on pp; the others are alike."""
MOST_SLICES = 8
"""Slices of a parameter that are written out."""
GAP = "   "


def parts(config: Config, found: "Outline", width: int) -> Iterator[RenderableType]:
    """What is printed, in order, in a window of `width` columns."""
    layout = layout_of(config)
    title = f"{layout.world} rank{'s' * (layout.world > 1)}: {axes_text(config)}, ZeRO level {config.zero.level}"
    about = "Of each rank: its blocks, its parameters before ZeRO shards them, and what ZeRO leaves it of these:"
    kinds = "w weights, g gradients, o optimizer state"
    if offloads(config):
        kinds += f"; offloaded: {what_is_offloaded(config)}"
    yield Text.assemble((title, "bold"), (f"\n{about}\n{kinds}", "dim"))
    held = [found.held(pp) for pp in range(layout.pp)]
    states = [predicted(config, mine) for mine in held]
    cells = [(blocks_text(found.blocks_of(pp)), count(sum(one.numel for one in held[pp]))) for pp in range(layout.pp)]
    kept = {(pp, dp): _kept(config, Place(dp, 0, pp), states[pp]) for pp, dp in _rows(layout)}
    yield from _grid(layout, cells, kept, width)
    if layout.pp > 1:
        outside = [f"pp {pp} has {', '.join(found.outside_of(pp)) or 'nothing'}" for pp in range(layout.pp)]
        yield Text(f"Outside the blocks: {'; '.join(outside)}.\nSchedule: {schedule_text(config)}.")
    cut = [info for info in found.infos if info.slicing is not None]
    if cut:
        yield _cut(found, width)
        yield _whole(found)
        yield _totals(found, layout)
    elif layout.pp == 1:
        yield Text(f"Every rank has the whole model: {count(sum(info.numel for info in found.infos))} parameters.")
    yield who_holds_what(config, states)


def _kept(config: Config, place: Place, states: Sequence[ModelStates]) -> str:
    """Such as `w all  g 1/2  o 1/2`; with the home of what is not on the device, as in `o 1/2 host`."""
    told = []
    for kind in KINDS:
        held, whole = (getattr(states[level], kind) for level in (config.zero.level, 0))
        number, parts = part_of(config, place, held, whole)
        away = f" {home_of(config, kind)}" if offloads(config) and not held else ""
        told.append(f"{kind[0]} " + ("all" if parts == 1 else f"{number}/{parts}") + away)
    return "  ".join(told)


def _grid(
    layout: Layout, cells: Sequence[tuple[str, str]], kept: Mapping[tuple[int, int], str], width: int
) -> Iterator[Text]:
    """Ranks by pp and dp below each other and by tp beside each other, in bands where they are too many."""
    heads = [f"pp {pp}  dp {dp}" for pp in range(layout.pp) for dp in range(layout.dp)]
    left = max(map(len, heads)) + len(GAP)
    names = [[f"rank {layout.rank(Place(dp, tp, pp))}" for tp in range(layout.tp)] for pp, dp in _rows(layout)]
    texts = (*(name for row in names for name in row), *(one for cell in cells for one in cell), *kept.values())
    wide = max(map(len, texts))
    band = max((width - left + len(GAP)) // (wide + len(GAP)), 1)
    for start in range(0, layout.tp, band):
        indexes = range(start, min(start + band, layout.tp))
        lines = [Text(" " * left + GAP.join(f"tp {tp}".ljust(wide) for tp in indexes), style="dim")]
        for (pp, dp), row in zip(_rows(layout), names):
            lines.append(
                Text.assemble((f"pp {pp}  dp {dp}".ljust(left), "dim"), *_joined(row, indexes, wide, "bold cyan"))
            )
            for text in (*cells[pp], kept[pp, dp]):
                lines.append(Text.assemble(" " * left, *_joined([text] * layout.tp, indexes, wide, "")))
            if dp == MOST_ROWS - 1 and layout.dp > MOST_ROWS:
                lines.append(Text(f"pp {pp}  dp {dp + 1} to {layout.dp - 1}: the same".ljust(left), style="dim"))
        yield Text("\n").join(lines)


def _rows(layout: Layout) -> list[tuple[int, int]]:
    """(pp index, dp index) of the rows that are drawn."""
    return [(pp, dp) for pp in range(layout.pp) for dp in range(min(layout.dp, MOST_ROWS))]


def _joined(texts: Sequence[str], indexes: range, wide: int, style: str) -> list[tuple[str, str]]:
    return [(texts[index].ljust(wide) + GAP * (index != indexes[-1]), style) for index in indexes]


def _cut(found: "Outline", width: int) -> Table:
    """One row for parameters that differ in their block alone. Slices are beside shapes, or below where the window is
    narrow: there may be as many as fill any."""
    columns = ["parameter", "number", "style", "whole -> on a rank"]
    rows = list(_cut_rows(found))
    table = _table("What tensor parallelism cuts", [*columns, "slices by tp index"])
    for cells in rows:
        table.add_row(*cells)
    if Console(width=10_000).measure(table).maximum <= width:
        return table
    table = _table("What tensor parallelism cuts, and slices by tp index", columns)
    for *others, shapes, slices in rows:
        table.add_row(*others, f"{shapes}\n{slices}")
    return table


def _cut_rows(found: "Outline") -> Iterator[tuple[str, str, str, str, str]]:
    for pattern, number, info in _alike(found, cut=True):
        assert info.slicing is not None
        shapes = f"{list(info.shape)} -> {list(info.local.shape)}"
        yield pattern, f"{number}", found.styles.get(info.name, ""), shapes, _slices(str(info.slicing))


def _whole(found: "Outline") -> Table:
    table = _table("What stays whole on every rank", ["parameter", "number", "shape", "elements"])
    for pattern, number, info in _alike(found, cut=False):
        table.add_row(pattern, f"{number}", f"{list(info.shape)}", count(number * info.numel))
    return table


def _totals(found: "Outline", layout: Layout) -> Text:
    cut = sum(info.numel for info in found.infos if info.slicing is not None)
    mine = sum(info.local.numel for info in found.infos if info.slicing is not None)
    whole = sum(info.numel for info in found.infos if info.slicing is None)
    who = "A rank has" if layout.pp == 1 else "The ranks of a pipeline have"
    part = (mine + whole) / (cut + whole)
    return Text(
        f"{count(cut)} parameters are cut into {layout.tp}, {count(mine)} each; {count(whole)} stay whole. "
        f"{who} {count(mine + whole)} of {count(cut + whole)}: {part:.1%}."
    )


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        right = name in ("number", "elements")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def _alike(found: "Outline", *, cut: bool) -> Iterator[tuple[str, int, "ParamInfo"]]:
    """(name with * for the block, how many there are, one of them) of parameters that are, or are not, cut."""
    for pattern, infos in found.patterns().items():
        mine = [info for info in infos if (info.slicing is not None) is cut]
        for _, group in groupby(mine, key=lambda info: (info.shape, info.slicing, found.styles.get(info.name))):
            alike = list(group)
            yield pattern if len(alike) > 1 else alike[0].name, len(alike), alike[0]


def _slices(text: str) -> str:
    """By tp index; of many the first ones and the last."""
    slices = text.split(" | ")
    if len(slices) > MOST_SLICES:
        slices = [*slices[: MOST_SLICES - 2], "..", slices[-1]]
    return " | ".join(slices)
