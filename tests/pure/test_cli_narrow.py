"""Tables in a narrow window: columns go, numbers stay whole."""

import pytest
from rich.cells import cell_len
from rich.console import Console

from zero3d.cli.plain_table import PlainTable

NUMBERS = ("12.34 MB", "56.78 MB", "90.12 MB")


def shown(width: int) -> list[str]:
    table = PlainTable("Sizes", ["rank"], ["weights", "gradients", "optimizer"], [" "], drop=[" ", "gradients"])
    table.add_row("0", *NUMBERS, "██████")
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


@pytest.mark.parametrize(
    ("width", "left"),
    [(80, "0 12.34 MB 56.78 MB 90.12 MB ██████"), (38, "0 12.34 MB 56.78 MB 90.12 MB"), (30, "0 12.34 MB 90.12 MB")],
)
def test_columns_are_left_out_in_the_order_given(width: int, left: str) -> None:
    lines = shown(width)
    assert max(map(cell_len, lines)) <= width
    assert " ".join(next(line for line in lines if "12.34" in line).split()) == left


def test_nothing_ends_in_dots_however_narrow() -> None:
    assert "…" not in "".join(shown(12))
