"""`zero3d calibrate`: measures what this machine's ranks compute, move and send, and writes a profile for the planner.

Starts its own ranks, as `train` does; under torchrun it is one of them, and rank 0 tells and writes what was found.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from zero3d.cli import machine
from zero3d.cli.checks import PROCESS_BYTES
from zero3d.cli.failure import Interrupted
from zero3d.cli.options import AsJson, Debug
from zero3d.cli.out_file import check_out, write_out
from zero3d.cli.rank import PARENT, run_as_rank, started_as
from zero3d.cli.reporting import reporting_errors
from zero3d.cli.signals import INTERRUPTED
from zero3d.cli.style import size
from zero3d.errors import UsageError

if TYPE_CHECKING:
    from zero3d.calibrate.measured import Measured, Progress
    from zero3d.planner.hardware import Cluster

FILE_WIDTH: Final = 120
"""Columns where the output is no terminal."""
SECONDS: Final = 20.0
RANK_BYTES: Final = PROCESS_BYTES + (300 << 20)
"""What a rank takes with the arrays that it measures on."""
LINE_PART: Final = 0.2
"""Where there is no terminal, a line of progress each time this part is done."""


def command(
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE.json", help="Where the profile goes; FILE.curves.json gets the curves."),
    ] = Path("profile.json"),
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--ranks", min=1, help="Ranks to start on this machine. Left out: one a GPU, or one a core."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="About how long it may measure; below 5 without large sizes.")
    ] = SECONDS,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure products, memory, links and the host's update, and write a profile for the planner."""
    environment = dict(os.environ)
    started = started_as(environment)
    if started is not None:
        rank, _ = started
        code = run_as_rank(
            lambda: _on_rank(rank, out, seconds, environment, as_json=as_json),
            environment,
            debug=debug,
            as_json=as_json,
        )
        raise typer.Exit(code)
    arguments = ["calibrate", "--out", str(out), "--seconds", str(seconds), *(["--json"] if as_json else [])]
    try:
        code = reporting_errors(lambda: _start(out, ranks, arguments, environment, debug=debug), as_json=as_json)
    except KeyboardInterrupt as end:
        print("zero3d: interrupted; no profile was written", file=sys.stderr)
        code = end.exit_code if isinstance(end, Interrupted) else INTERRUPTED
    raise typer.Exit(code)


def _start(out: Path, ranks: int | None, arguments: Sequence[str], environment: dict[str, str], *, debug: bool) -> None:
    """In the process that the user started."""
    check_files(out)
    if ranks is not None:
        check_memory(ranks)  # Whether there are GPUs takes seconds to learn.
    gpus = machine.gpus()
    if ranks is not None and gpus and ranks > gpus:
        raise UsageError(f"-n {ranks} for {gpus} GPUs; a GPU takes one rank", hint=f"Start {gpus} (-n {gpus}).")
    chosen = ranks or gpus or machine.cpu_cores()
    check_memory(chosen)
    print(f"starting {chosen} rank{'s' * (chosen > 1)} ...", file=sys.stderr)
    from zero3d.cli.launch import run_ranks

    try:
        failed = run_ranks([*arguments, *(["--debug"] if debug else [])], chosen, environment, debug=debug)
    finally:
        if sys.stderr.isatty():  # A rank that was ended while it drew a bar has left the cursor hidden.
            print("\x1b[?25h", end="", file=sys.stderr)
    if failed is not None:
        raise failed


def check_files(out: Path) -> None:
    """The profile and the curves can be written. Raises `UsageError`."""
    check_out(out, suffix=".json", what="a profile is JSON")
    check_out(curves_file(out))


def check_memory(ranks: int) -> None:
    """So many ranks have room. Raises `UsageError`."""
    free, needed = machine.free_memory(), RANK_BYTES * ranks
    if free is None or needed <= free:
        return
    fits = free // RANK_BYTES
    raise UsageError(
        f"{ranks} rank{'s' * (ranks > 1)} need about {size(needed)}, and this machine has {size(free)} of memory free",
        hint=f"Start at most {fits} (-n {fits})." if fits else "Free some.",
    )


def _on_rank(rank: int, out: Path, seconds: float, environment: dict[str, str], *, as_json: bool) -> None:
    """In each process that `_start` or torchrun started."""
    from zero3d.calibrate.measure import measure, this_machine
    from zero3d.calibrate.measured import Effort
    from zero3d.calibrate.profile import cluster_of
    from zero3d.offload.machine import of_machine

    if PARENT not in environment:
        check_files(out)
    free = of_machine()
    here = this_machine(
        per_node=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        cores=machine.cpu_cores(),
        host_memory=float(free.available if free else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
    )
    with _progress(rank) as progress:
        measured = measure(Effort.within(seconds), here, progress)
    if rank == 0:
        cluster = cluster_of(measured)
        write(out, cluster, measured)
        _tell(out, cluster, measured, as_json=as_json)


def curves_file(out: Path) -> Path:
    """Beside the profile: all that was measured."""
    return out.with_suffix(".curves.json")


def write(out: Path, cluster: "Cluster", measured: "Measured") -> None:
    """The profile, as the planner takes it, and the curves."""
    for file, text in ((out, cluster.to_json()), (curves_file(out), json.dumps(measured.as_tree(), indent=1))):
        write_out(file, f"{text}\n")


def as_event(out: Path, cluster: "Cluster", measured: "Measured", notes: Sequence[str]) -> dict[str, object]:
    """What programs read."""
    return {
        "event": "done",
        "profile": str(out),
        "curves": str(curves_file(out)),
        "cluster": cluster.model_dump(),
        "measured": measured.as_tree(),
        "notes": list(notes),
    }


@contextmanager
def _progress(rank: int) -> "Iterator[Progress]":
    """On stderr, of rank 0: a bar on a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if rank != 0:
        yield lambda what, part: None
    elif console.is_terminal:
        with Bar(console=console, transient=True) as bar:
            task = bar.add_task("measuring", total=1.0)
            yield lambda what, part: bar.update(task, completed=part, description=what)
    else:
        told = [-LINE_PART]

        def line(what: str, part: float) -> None:
            if part >= told[0] + LINE_PART:
                told[0] = part
                print(f"measuring: {part:.0%}, {what}", file=sys.stderr, flush=True)

        yield line


def _tell(out: Path, cluster: "Cluster", measured: "Measured", *, as_json: bool) -> None:
    from rich.console import Console

    from zero3d.calibrate.profile import notes
    from zero3d.cli.calibrate_tables import tables

    odd = notes(measured)
    if as_json:
        print(json.dumps(as_event(out, cluster, measured, odd)), flush=True)
        return
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for table in tables(measured, cluster):
        console.print(table)
    for sentence in odd or ["Nothing odd was found."]:
        console.print(sentence, highlight=False, markup=False)
    console.print(f"The profile is in {out}, all curves in {curves_file(out)}.", highlight=False, markup=False)
