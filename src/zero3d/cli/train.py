"""`zero3d train CONFIG`: checks all that can be known, starts the ranks, reports one error.

The same verb is what each rank runs: with RANK and WORLD_SIZE set (by ourselves or by torchrun) this process is
a rank. torch is loaded only once the configuration and the data are in order.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from zero3d.cli import checks
from zero3d.cli.failure import Interrupted, as_known
from zero3d.cli.options import AllowCode, AsJson, ConfigPath, Debug, Options, Ranks, Settings
from zero3d.cli.rank import PARENT, STEP_FILE, TOKENS, StepFile, run_as_rank, started_as
from zero3d.cli.signals import NUMBERS, Signals, exit_code
from zero3d.config import Config
from zero3d.records import CHECKPOINTS, METRICS
from zero3d.wandb_records import WeightsAndBiases, check_wandb

if TYPE_CHECKING:
    from zero3d.data.prepare import Prepared, Progress
    from zero3d.models.presets import Build
    from zero3d.train import Listener

TRACED_STEPS = 3
"""With --trace, where nobody says how many."""
FILE_WIDTH = 100
"""Columns where no terminal says how many there are."""


def command(
    config: ConfigPath,
    ranks: Ranks = None,
    settings: Settings = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write what ranks do in 3 steps: a trace and a picture.")
    ] = False,
    trace_steps: Annotated[
        int | None, typer.Option("--trace-steps", min=1, help="--trace of so many steps.", metavar="STEPS")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of run.out; without one, begin.")
    ] = False,
    allow_missing: Annotated[
        bool,
        typer.Option(
            "--allow-missing",
            help="With --resume: what the checkpoint lacks stays as it is, and what it has besides is left out.",
        ),
    ] = False,
    as_json: AsJson = False,
    allow_code: AllowCode = False,
    debug: Debug = False,
) -> None:
    """Train a model as CONFIG says."""
    traced = trace_steps or (TRACED_STEPS if trace else 0)
    if allow_missing and not resume:
        raise typer.BadParameter("is for --resume: without it nothing is loaded that could lack something.")
    going_on = {"--resume": resume, "--allow-missing": allow_missing}
    options = Options(
        config=config,
        settings=tuple(settings or ()),
        ranks=ranks,
        json=as_json,
        debug=debug,
        allow_code=allow_code,
        more=(*(("--trace-steps", str(traced)) if traced else ()), *(flag for flag, on in going_on.items() if on)),
    )
    raise typer.Exit(run_verb(options, partial(_train_on_rank, traced, resume, allow_missing)))


def run_verb(options: Options, on_rank: Callable[[Options, int, int], int | None]) -> int:
    """Starts ranks, or is one of them and calls `on_rank(options, rank, world)`. -> the exit code."""
    environment = dict(os.environ)
    started = started_as(environment)
    if started is None:
        return reporting_errors(lambda: start(options, environment), options)
    return run_as_rank(lambda: on_rank(options, *started), environment, debug=options.debug, as_json=options.json)


def start(options: Options, environment: dict[str, str]) -> None:
    """In the process that the user started."""
    config = Config.load(options.config, options.settings)
    checks.check_code(config, options.allow_code)
    check_wandb(config)
    # How many ranks there are may hang on the number of GPUs, which takes seconds to learn: the rest first.
    if options.ranks is not None or config.parallel.dp != "auto":
        checks.check_ranks(config, checks.choose_ranks(config, options.ranks))
    checks.check_folder(Path(config.run.out))
    with checks.only_run_in(Path(config.run.out)):
        _run(config, options, environment)


def _run(config: Config, options: Options, environment: dict[str, str]) -> None:
    """Prepares what ranks need, checks what can be known, and starts them."""
    with _progress(options) as progress:
        prepared = checks.prepare_data(config, progress)
    ranks = checks.choose_ranks(config, options.ranks)
    checks.check_ranks(config, ranks)
    checks.check_gpus(ranks)
    checks.check_model(config, prepared, ranks, options.allow_code)
    from zero3d.cli.launch import run_ranks

    if sys.stderr.isatty():
        print(f"starting {ranks} rank{'s' * (ranks > 1)} ...", file=sys.stderr)
    try:
        # Ranks train on what was checked here, whatever becomes of its source meanwhile.
        environment[TOKENS] = prepared.name
        failed = run_ranks(options.as_arguments(), ranks, environment, debug=options.debug)
    except Interrupted as end:
        end.told = _until_then(config, end)
        raise
    if failed is not None:
        raise failed


def _until_then(config: Config, end: Interrupted) -> str:
    """How far a run came that was interrupted, and where its checkpoint and its measurements are."""
    told, step = end.told, end.step
    if step is None:
        return told
    metrics = Path(config.run.out) / METRICS
    if end.end is not None:
        told = str(end.end["message"])
    else:
        told += f" of {config.num_steps:,}"
        saved = [one.name for one in (metrics.parent / CHECKPOINTS).glob("step-*") if "." not in one.name]
        told += f"; --resume goes on from {max(saved)}" if saved else ""
    # With run.log_every there may be no line yet.
    return f"{told}; metrics are in {metrics}" if step >= config.run.log_every else told


def _train_on_rank(traced: int, resume: bool, allow_missing: bool, options: Options, rank: int, world: int) -> int:
    """In each process that `start` or torchrun started."""
    from zero3d import train
    from zero3d.stopping import Stopped

    checks.check_restarted(os.environ, resume=resume)
    config, prepared, build = read_on_rank(options, world)
    alone = PARENT not in os.environ
    if alone:  # under torchrun, which was told how many
        options = replace(options, ranks=world)
    listeners = _listeners(config, options) if rank == 0 else ()
    ended = train.train(
        config, prepared, build, listeners, traced, resume, Signals(alone=alone), allow_missing=allow_missing
    )
    if not alone or not isinstance(ended, Stopped):
        return 0
    if rank == 0:
        print(f"zero3d: {ended.told}", file=sys.stderr)
    return exit_code(ended.signal, saved=ended.checkpoint is not None)


def read_on_rank(options: Options, world: int) -> "tuple[Config, Prepared, Build]":
    """The configuration, the data that `start` prepared, and the function that builds the model."""
    from zero3d.models.presets import build_function

    config = Config.load(options.config, options.settings)
    checks.check_code(config, options.allow_code)
    checks.check_started(options.ranks, world)
    prepared = checks.prepare_data(config, None, os.environ.get(TOKENS, ""))
    length = config.data.sequence_length
    return config, prepared, build_function(config.model, prepared.vocabulary, length, allow_code=options.allow_code)


def _listeners(config: Config, options: Options) -> "list[Listener]":
    """Who is told how it goes: people or programs, and the run's folder."""
    from rich.console import Console

    from zero3d.cli.events import Events
    from zero3d.cli.screen import Screen
    from zero3d.records import RunFolder, TensorBoard

    out = Path(config.run.out)
    folder = RunFolder(out)
    listeners: list[Listener] = [folder]
    if STEP_FILE in os.environ:
        listeners.append(StepFile(Path(os.environ[STEP_FILE])))
    if TensorBoard.is_there():
        listeners.append(TensorBoard(out))
    if config.run.wandb is not None:
        check_wandb(config)  # Under torchrun nobody has yet.
        listeners.append(WeightsAndBiases(config.run.wandb, out))
    if options.json:
        listeners.append(Events(sys.stdout))
    # Where stdout belongs to a program, people still see on stderr how far it is.
    console = Console(stderr=options.json)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    listeners.append(Screen(console, brief=options.json, options=options, folder=folder))
    return listeners


@contextmanager
def _progress(options: Options) -> "Iterator[Progress | None]":
    """Shows how far the tokenizing is, on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("reading the data") as status:
        yield lambda what, part: status.update(Text(f"{what}: {part:.0%}"))


def _after_a_bar() -> str:
    """A rank that was ended while it drew a bar has left its line open and the cursor hidden."""
    return "\n\x1b[?25h" if sys.stderr.isatty() else ""


def _print_line(line: str) -> None:
    """To stdout, unless its reader has gone or the disk behind it is full."""
    try:
        print(line, flush=True)
    except OSError:
        # What is still buffered would be tried again at exit, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(NUMBERS[number])


def reporting_errors(work: Callable[[], None], options: Options) -> int:
    """-> the exit code. An error is one short text on stderr and, with --json, a line on stdout."""
    for number in NUMBERS:
        signal.signal(number, _interrupt)
    try:
        work()
    except Interrupted as end:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)  # All is ended; another one would only break the goodbye.
        print(f"{_after_a_bar()}zero3d: {end.told}", file=sys.stderr)
        return end.exit_code
    except Exception as error:
        known = as_known(error)
        if options.debug:
            print(getattr(error, "trace", "") or traceback.format_exc(), file=sys.stderr)
        print(f"{_after_a_bar()}zero3d: {known}", file=sys.stderr)
        if options.json:
            _print_line(json.dumps(known.as_event()))
        return known.exit_code
    return 0
