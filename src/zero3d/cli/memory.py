"""`zero3d memory --params 7.5e9 --dp 64`: the table of ZeRO for a number of parameters. Starts no ranks, loads no
torch."""

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Final, get_args

import typer
from rich.console import Console

from zero3d.cli.options import AsJson
from zero3d.cli.plain_table import PlainTable
from zero3d.cli.reporting import reporting_errors
from zero3d.cli.style import count, size
from zero3d.errors import UsageError
from zero3d.planner.memory import LEVELS, Offloaded, Row, Widths, table

FILE_WIDTH = 120
"""Columns where the output is no terminal."""
SCALES: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
TABLE_1: Final = "1,4,16,64,256,1024"
"""The sizes of dp in the table of ZeRO's paper."""
MOST_PARAMETERS: Final = 10**18
MOST_RANKS: Final = 10**7
MOST_BYTES: Final = 1024
"""Of a parameter, of each kind."""
SHORT: Final = {"optimizer": "{}, offloaded", "parameters": "{}, all"}
"""How columns call a level with offload."""


def command(
    params: Annotated[
        str, typer.Option("--params", metavar="NUMBER", help="Parameters of the model: 7.5e9, 7.5B, 350M.")
    ],
    dp: Annotated[
        str,
        typer.Option(
            "--dp",
            "--devices",
            "--world",
            metavar="N[,N...]",
            help="Ranks on the axis dp; several numbers: a line each.",
        ),
    ] = TABLE_1,
    k: Annotated[
        int,
        typer.Option(
            "--k",
            min=0,
            max=MOST_BYTES,
            help="Bytes of optimizer state a parameter: fp32 master and two moments are 12.",
        ),
    ] = 12,
    weights: Annotated[int, typer.Option("--weights", min=1, max=MOST_BYTES, help="Bytes of a weight.")] = 2,
    gradients: Annotated[
        int, typer.Option("--gradients", min=1, max=MOST_BYTES, help="Bytes of a held gradient; zero3d's default is 4.")
    ] = 2,
    level: Annotated[int | None, typer.Option("--level", min=0, max=3, help="This level of ZeRO alone.")] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload", metavar="WHAT", help="optimizer, parameters or none: which rows with offload; left out, both."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the model states that a rank holds at each level of ZeRO, and with offload.

    Weights, gradients and optimizer state; activations and buffers come on top.
    """

    def work() -> None:
        parameters, ranks = number_of(params), ranks_of(dp)
        widths = Widths(weights=weights, gradients=gradients, optimizer=k)
        levels = LEVELS if level is None else (level,)
        offloads = _offloads(offload, level)
        rows = {each: table(parameters, dp=each, widths=widths, levels=levels, offloads=offloads) for each in ranks}
        if as_json:
            for each in ranks:
                print(json.dumps(as_event(parameters, each, rows[each])))
        else:
            _show(parameters, rows, widths)

    raise typer.Exit(reporting_errors(work, as_json=as_json))


def number_of(text: str) -> int:
    """A count of parameters such as "7.5e9", "7.5B" or "350M". Raises `UsageError`.

    >>> number_of("7.5e9"), number_of("7.5B"), number_of("124 M"), number_of("1_558_000_000")
    (7500000000, 7500000000, 124000000, 1558000000)
    """
    found = re.fullmatch(r"([\d.,_]+(?:e[+-]?\d+)?) *([KMBGT]?)", text.strip(), re.IGNORECASE)
    try:
        value = Decimal(re.sub("[,_]", "", found[1])) * SCALES[found[2].upper()] if found else None
    except ArithmeticError:
        value = None
    wrong = (
        "is no number of parameters"
        if value is None
        else "is not from 1 to 1e18"
        if not 1 <= value <= MOST_PARAMETERS
        else "is no whole number"
        if value != int(value)
        else ""
    )
    if value is None or wrong:
        raise UsageError(f"--params {text} {wrong}", hint="Write a number such as 7.5e9, 7.5B, 350M or 124439808.")
    return int(value)


def ranks_of(text: str) -> list[int]:
    """Sizes of dp such as "64" or "1,4,16". Raises `UsageError`."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,7}", word) and int(word) <= MOST_RANKS for word in words):
        raise UsageError(
            f"--dp {text} is no number of ranks",
            hint="Write a number of ranks from 1 on, such as 64, or several: 1,4,16,64.",
        )
    return list(dict.fromkeys(map(int, words)))


def as_event(parameters: int, dp: int, rows: Sequence[Row]) -> dict[str, object]:
    """What programs read: bytes of each rank."""
    return {"params": parameters, "dp": dp, "levels": [_as_level(row) for row in rows]}


def _as_level(row: Row) -> dict[str, object]:
    states = row.states
    told: dict[str, object] = {
        "level": row.level,
        "device_bytes": states.device,
        "host_bytes": states.host,
        "device_by_kind": {
            "weights": states.weights,
            "gradients": states.gradients,
            "optimizer": states.optimizer,
        },
    }
    return told if row.offload is None else {**told, "offload": row.offload}


def _offloads(asked: str | None, level: int | None) -> tuple[Offloaded, ...]:
    known: tuple[Offloaded, ...] = get_args(Offloaded)
    if asked is None:
        return known
    if asked not in (*known, "none"):
        raise UsageError(f"--offload {asked}", hint=f"It is one of {', '.join(known)}, none.")
    if asked == "parameters" and level not in (None, 3):
        raise UsageError(
            f"--offload parameters with --level {level}: weights are whole on every rank below level 3",
            hint="Use --level 3, or --offload optimizer.",
        )
    if asked == "optimizer" and level == 0:
        raise UsageError(
            "--offload optimizer with --level 0: nothing is sharded there, so nothing is offloaded",
            hint="Use --level 1, 2 or 3.",
        )
    return tuple(one for one in known if one == asked)


def _size(num_bytes: float) -> str:
    """Halves are rounded up, as in the tables of the papers: 41.25 is 41.3."""
    return size(num_bytes * (1 + 1e-9))


def _show(parameters: int, rows: dict[int, list[Row]], widths: Widths) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(_by_kind(parameters, rows) if len(rows) == 1 else _by_dp(parameters, rows))
    told = (
        f"{widths.weights} bytes of weights, {widths.gradients} of gradients and {widths.optimizer} of optimizer state"
    )
    sentences = [f"Model states alone, with {told} a parameter; activations and buffers come on top."]
    if len(rows) > 1 and any(row.offload for row in next(iter(rows.values()))):
        sentences.append("Offloaded: bytes of the device + of the host; all: weights too.")
    if widths.gradients < 4:
        sentences.append("Gradients of several micro-batches are summed in fp32 by default, which is --gradients 4.")
    for sentence in sentences:
        console.print(sentence, highlight=False, markup=False)


def _by_kind(parameters: int, rows: dict[int, list[Row]]) -> PlainTable:
    """One dp: a line for each level."""
    ((dp, lines),) = rows.items()
    title = f"Bytes of {count(parameters)} parameters on each of {dp:,} rank{'s' * (dp > 1)}"
    kinds = ["weights", "gradients", "optimizer"]
    shown = PlainTable(title, ["level", "on the host"], [*kinds, "device", "host"], drop=["gradients", "weights"])
    for row in lines:
        states = row.states
        where = {"optimizer": "optimizer", "parameters": "optimizer, weights"}[row.offload] if row.offload else "-"
        shown.add_row(
            str(row.level),
            where,
            *(_size(getattr(states, kind)) for kind in kinds),
            size(states.device),
            size(states.host),
        )
    return shown


def _by_dp(parameters: int, rows: dict[int, list[Row]]) -> PlainTable:
    """Several: a line for each, as in table 1 of ZeRO; with offload device + host."""
    (first, *_) = rows.values()
    columns = [SHORT[row.offload].format(row.level) if row.offload else str(row.level) for row in first]
    shown = PlainTable(f"{count(parameters)} parameters: bytes by level", [], ["dp", *columns], drop=columns[::-1])
    for dp, lines in rows.items():
        shown.add_row(f"{dp:,}", *(_cell(row) for row in lines))
    return shown


def _cell(row: Row) -> str:
    parts = [row.states.device, row.states.host] if row.offload else [row.states.device]
    return " + ".join(_size(part) for part in parts if part)
