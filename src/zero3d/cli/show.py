"""`zero3d show WHAT`: things that a run is made of, as pictures and tables. Nothing here trains or loads torch."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from zero3d.cli import show_checkpoint, show_layout
from zero3d.cli.options import AsJson
from zero3d.cli.reporting import reporting_errors
from zero3d.errors import UsageError
from zero3d.pipeline import legal, picture
from zero3d.pipeline.action import Action, Kind, written
from zero3d.pipeline.schedules import own
from zero3d.pipeline.schedules.registry import SCHEDULES, Named
from zero3d.pipeline.simulate import Timeline, peak_live, simulate

app = typer.Typer(help="Show who holds what, a pipeline schedule, or what is in a checkpoint.", no_args_is_help=True)
app.command("layout")(show_layout.command)
app.command("checkpoint")(show_checkpoint.command)

FILE_WIDTH = 120
"""Columns where the output is no terminal."""
MOST_ACTIONS = 1_000_000
"""More would take minutes and say nothing new."""
NAMES = f"{', '.join(SCHEDULES)}, or a file of your own (*.txt)"


@app.callback()
def _what() -> None:
    """Show who holds what, a pipeline schedule, or what is in a checkpoint."""


@app.command("schedule")
def schedule(
    name: Annotated[str, typer.Option("--schedule", metavar="NAME", help=f"{NAMES}.")],
    stages: Annotated[int | None, typer.Option("--stages", min=1, help="Stages in all; a file says it itself.")] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", min=1, help="Micro-batches of a step; a file says it itself.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Ranks that share the stages; left out, what is usual.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--picture", metavar="FILE.svg", help="Draw it into a file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show who computes what when, how long ranks are idle, and what they hold.

    The unit of time is one forward of a stage; the two parts of a backward take one each.
    """

    def work() -> None:
        chosen = own.find(name)
        actions = _actions(chosen, stages, ranks, micro_batches)
        timeline = simulate(actions)
        if file is not None:
            _draw(file, timeline, chosen.name)
        if as_json:
            print(json.dumps(as_event(actions, timeline)))
        else:
            _show(chosen, actions, timeline, file)

    raise typer.Exit(reporting_errors(work, as_json=as_json))


def as_event(actions: list[list[Action]], timeline: Timeline) -> dict[str, object]:
    """What programs read."""
    return {
        "ranks": written(actions),
        "bubble": timeline.bubble,
        "makespan": timeline.makespan,
        "peak_live": peak_live(actions),
    }


def _actions(chosen: Named, stages: int | None, ranks: int | None, micro_batches: int | None) -> list[list[Action]]:
    if isinstance(chosen, own.OwnSchedule):
        stages = chosen.num_stages if stages is None else stages
        micro_batches = chosen.num_micro_batches if micro_batches is None else micro_batches
    if stages is None or micro_batches is None:
        missing = "--stages" if stages is None else "--micro-batches"
        raise UsageError(f"{missing} is missing", hint="Such as: --stages 4 --micro-batches 8")
    if stages * micro_batches > MOST_ACTIONS:
        raise UsageError(
            f"{stages} stages of {micro_batches} micro-batches are too many to show",
            hint=f"Their product may be {MOST_ACTIONS:,} at most; a schedule repeats itself long before.",
        )
    ranks = chosen.usual_ranks(stages) if ranks is None else ranks
    actions = chosen.actions(stages, ranks, micro_batches)
    legal.check(actions, chosen.placement(stages, ranks), where=chosen.name)
    return actions


def _draw(file: Path, timeline: Timeline, name: str) -> None:
    if file.suffix != ".svg":
        raise UsageError(f"{file}: pictures are drawn as SVG", hint=f"Name it {file.with_suffix('.svg')}.")
    try:
        file.write_text(picture.svg(timeline, f"{name}: {_told(timeline)}"), encoding="utf-8")
    except OSError as error:
        if error.errno in (28, 122):
            raise
        raise UsageError(f"cannot write {file}: {error.strerror}", hint="Name a file in a folder of yours.") from None


def _told(timeline: Timeline) -> str:
    return f"{timeline.makespan:g} units of time, {timeline.bubble:.1%} more than the busiest rank computes"


def _show(chosen: Named, actions: list[list[Action]], timeline: Timeline, file: Path | None) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    labels = [f"rank {rank}" for rank in range(len(actions))]
    wide = max(map(len, labels)) + 2
    # Text: nothing of it is markup, nor are numbers to be coloured.
    console.print(Text(f"{chosen.name}: {_told(timeline)}", style="bold"))
    console.print()
    for band in picture.lines(timeline, console.width - wide):
        for label, cells in zip(labels, band, strict=True):
            line = Text(label.ljust(wide), style="bold cyan", no_wrap=True)
            for cell in cells:
                line.append(cell.text.rstrip(), style=_style(cell))
                line.append(" " * (len(cell.text) - len(cell.text.rstrip())), style="none")
            console.print(line, soft_wrap=True)
        console.print()
    used = {action.kind for rank in actions for action in rank}
    told = ", ".join(f"{kind.value} {picture.NAMES[kind]}" for kind in Kind if kind in used)
    console.print(Text(f"{told}; {picture.IDLE} idle"))
    several = max(len({action.stage for action in rank}) for rank in actions) > 1
    what = "activations of one stage and micro-batch" if several else "micro-batches"
    console.print(Text(f"most {what} live, by rank: {' '.join(map(str, peak_live(actions)))}"))
    if file is not None:
        console.print(Text(f"drawn in {file}"))


def _style(cell: picture.Cell) -> str:
    if cell.kind is None:
        return "dim"
    return f"{'white' if cell.shade > 0.5 else 'black'} on {picture.colour(cell.kind, cell.shade)}"
