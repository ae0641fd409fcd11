"""`zero3d VERB`. Each verb is a module of this package; this one only names them."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from zero3d.cli import train

app = typer.Typer(
    name="zero3d",
    help="Large-model training with ZeRO and 3D parallelism: plan it, rehearse it, run exactly that.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"zero3d {version('zero3d')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Large-model training with ZeRO and 3D parallelism: plan it, rehearse it, run exactly that."""


def entry() -> None:
    """What the command `zero3d` runs."""
    try:
        app(prog_name="zero3d")
    except KeyboardInterrupt:
        sys.exit(130)
