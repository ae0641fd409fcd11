"""`zero3d VERB`. Each verb is a module of this package; this one only names them."""

import sys
from importlib.metadata import version
from typing import Annotated, cast

import typer

from zero3d.cli import calibrate, convert, doctor, dryrun, export, memory, plan, report, show, top, train, verify

app = typer.Typer(
    name="zero3d",
    help="Train PyTorch models with ZeRO levels 0 to 3: the same numbers at every level.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.command)
app.command("verify")(verify.command)
app.command("export")(export.command)
app.command("plan")(plan.command)
app.command("dryrun")(dryrun.command)
app.command("memory")(memory.command)
app.command("calibrate")(calibrate.command)
app.command("report")(report.command)
app.command("convert-config")(convert.command)
app.command("doctor")(doctor.command)
app.command("top")(top.command)
app.add_typer(show.app, name="show")


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
    """Train PyTorch models with ZeRO levels 0 to 3: the same numbers at every level."""


UsageError = cast("type[Exception]", typer.BadParameter.__base__)
"""What typer raises when it cannot read the command line."""


def entry() -> None:
    """What the command `zero3d` runs."""
    try:
        sys.exit(app(prog_name="zero3d", standalone_mode=False))
    except UsageError as error:
        told = str(error.format_message())  # type: ignore[attr-defined]
        if not sys.argv[1:] or not told:  # then it is the help, which may be printed already
            print(told)
        else:
            # typer's own frame would break words and paths where the window is narrow.
            verbs = [*(one.name for one in app.registered_commands), *(one.name for one in app.registered_groups)]
            verb = f" {sys.argv[1]}" if sys.argv[1] in verbs else ""
            print(f"zero3d: {told}\n`zero3d{verb} --help` lists what there is.", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
