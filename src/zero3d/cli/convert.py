"""`zero3d convert-config ds_config.json`: a DeepSpeed configuration as one of zero3d, and what became of each key."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zero3d.cli.options import AsJson, Settings
from zero3d.cli.reporting import reporting_errors
from zero3d.config import Config
from zero3d.config_io import write_toml
from zero3d.errors import ConfigError, UsageError
from zero3d.moving.deepspeed import convert, read
from zero3d.moving.reading import Converted

FILE_WIDTH: Final = 120
"""Columns where the output is no terminal."""


def command(
    source: Annotated[Path, typer.Argument(help="A DeepSpeed configuration, such as ds_config.json.", metavar="JSON")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="CONFIG.toml", help="Where the TOML goes. Left out: to stdout.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Ranks that share a global batch, which the file lacks.")
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Read a DeepSpeed configuration and write one of zero3d; list what has no equal, and what "auto" leaves open."""

    def work() -> None:
        if out is not None:
            check_out(out)
        converted = settled(convert(read(source), dp=ranks), settings or [])
        config = checked(converted, settings or [])
        text = as_toml(source, converted, config)
        if out is not None:
            out.write_text(text, encoding="utf-8")
        if as_json:
            print(json.dumps(as_event(out, converted, config)))
            return
        if out is None:
            print(text, end="")
        _show(converted)
        if out is not None:
            print(f"wrote {out}; look at it by zero3d show layout {out}", file=sys.stderr)

    raise typer.Exit(reporting_errors(work, as_json=as_json))


def check_out(out: Path) -> None:
    """The file is new, and a TOML file. Raises `UsageError`."""
    if out.suffix != ".toml":
        raise UsageError(f"--out {out}: a configuration is TOML", hint=f"Name it {out.with_suffix('.toml')}.")
    if out.exists():
        raise UsageError(f"--out {out} is there already", hint="Name a new file, or remove it first.")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no such folder", hint="Name a file in a folder that is there.")


def settled(converted: Converted, settings: list[str]) -> Converted:
    """The same without what --set settles: no longer open, and no longer said to be from the file."""
    keys = {one.partition("=")[0].strip() for one in settings}
    return replace(
        converted,
        open=[one for one in converted.open if one.ours not in keys],
        taken=[one for one in converted.taken if one.ours not in keys],
    )


def checked(converted: Converted, settings: list[str]) -> Config:
    """The configuration, with what the user has set. Raises `ConfigError`, which says how it can be set."""
    try:
        return Config.load(converted.tree, settings)
    except ConfigError as error:
        raise ConfigError(
            f"what the file says does not fit together here: {error.message}",
            where=error.where,
            hint=f"{error.hint} Say it with --set KEY=VALUE.".strip(),
        ) from None


def as_toml(source: Path, converted: Converted, config: Config) -> str:
    """Keys that were taken, or set, each with theirs as a comment; at the end what was left out for lack of an equal,
    and what is open."""
    said = config.model_dump(exclude_unset=True)
    lines = [f"# Made from {source.name} by zero3d convert-config.", "", write_toml(said, converted.notes).rstrip()]
    lost = [f"# {one.theirs}: {one.why}" for one in converted.left_out if one.needed]
    open_ = [f"# {one.ours}: {one.why} ({one.theirs})" for one in converted.open]
    for title, rows in (("Without an equal here:", lost), ("To be set by you:", open_)):
        lines += ["", f"# {title}", *rows] if rows else []
    return "\n".join(lines) + "\n"


def as_event(out: Path | None, converted: Converted, config: Config) -> dict[str, object]:
    """What programs read."""
    return {
        "event": "done",
        "out": None if out is None else str(out),
        "config": config.model_dump(mode="json", exclude_unset=True),
        "taken": [one._asdict() for one in converted.taken],
        "left_out": [one._asdict() for one in converted.left_out],
        "open": [one._asdict() for one in converted.open],
    }


def _show(converted: Converted) -> None:
    """On stderr: stdout may be the TOML."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(f"{len(converted.taken)} keys taken", highlight=False)
    for title, rows in (
        ("To be set by you", [(one.ours, f"{one.why} ({one.theirs})") for one in converted.open]),
        ("Without an equal here", [(one.theirs, one.why) for one in converted.left_out if one.needed]),
        ("Nothing to be said", [(one.theirs, one.why) for one in converted.left_out if not one.needed]),
    ):
        if not rows:
            continue
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for key, why in rows:
            table.add_row(Text(key), Text(why))
        console.print(table)
