"""A table that leaves columns out rather than to cut numbers."""

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table


class PlainTable:
    """Words on the left of their columns, numbers on the right of theirs.

    Where the window is too narrow it first moves the columns together, then leaves out those of `drop` from the
    first on; a number is never cut.
    """

    def __init__(
        self, title: str, words: list[str], numbers: list[str], more_words: list[str] | None = None, *, drop: list[str]
    ) -> None:
        self._title = title
        self._columns = [
            *((name, "left") for name in words),
            *((name, "right") for name in numbers),
            *((name, "left") for name in more_words or []),
        ]
        self._drop = drop
        self._rows: list[tuple[tuple[str, ...], str | None]] = []

    def add_row(self, *cells: str, style: str | None = None) -> None:
        self._rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table(set(), padding=1)
        for number in range(len(self._drop) + 1):
            if number or not _fits(table, console, options):
                table = self._table(set(self._drop[:number]), padding=0)
            if _fits(table, console, options):
                break
        yield table

    def _table(self, left_out: set[str], padding: int) -> Table:
        table = Table(
            title=self._title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, padding)
        )
        shown = [number for number, (name, _) in enumerate(self._columns) if name not in left_out]
        for number in shown:
            name, justify = self._columns[number]
            # Folded, should nothing fit at all: a number goes on below, rather than to end in dots.
            table.add_column(name.strip(), justify=justify, overflow="fold")  # type: ignore[arg-type]
        for cells, style in self._rows:
            table.add_row(*(cells[number] for number in shown), style=style)
        return table


def _fits(table: Table, console: Console, options: ConsoleOptions) -> bool:
    wide = options.update(width=1000, max_width=1000)
    return Measurement.get(console, wide, table).maximum <= options.max_width
