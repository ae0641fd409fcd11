"""`zero3d dryrun CONFIG --world 512`: the step of chosen ranks, rehearsed on tensors without data. Starts no ranks."""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zero3d.cli import checks, train
from zero3d.cli.options import AllowCode, AsJson, ConfigPath, Debug, Options, Settings
from zero3d.cli.out_file import check_out, write_out
from zero3d.config import Config

if TYPE_CHECKING:
    from zero3d.dryrun.rehearsal import Rehearsal
    from zero3d.dryrun.run import Job

FILE_WIDTH = 120
"""Columns where the output is no terminal."""
MOST_RANKS = 1_000_000


def command(
    config: ConfigPath,
    world: Annotated[
        int | None,
        typer.Option("-n", "--world", min=1, max=MOST_RANKS, help="Ranks in all; left out, the product of the sizes."),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option("--rank", metavar="R", help="Rehearse rank R; may be repeated. Left out: each role once."),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", min=1, help="Of a step; left out, as CONFIG says.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="A folder with a Transformers config.json, in place of [model]. No weights."),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option("--vocabulary", min=1, help="Token kinds; left out, those of data.tokenizer.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write what --json prints to a file, such as RUN/dryrun.json.")
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
    allow_code: AllowCode = False,
    debug: Debug = False,
) -> None:
    """Rehearse a step of any world on this machine: memory at its peak, traffic, FLOPs and pipeline."""
    options = Options(
        config=config,
        settings=tuple(settings or ()),
        ranks=world,
        json=as_json,
        debug=debug,
        allow_code=allow_code,
        verb="dryrun",
    )

    def work() -> None:
        if out is not None:
            check_out(out)
        chosen = list(dict.fromkeys(ranks or []))
        found = _rehearsed(options, chosen, micro_batches, model, vocabulary)
        event = json.dumps(found.as_event())
        if out is not None:
            write_out(out, f"{event}\n")
        if as_json:
            print(event)
        else:
            _show(found, options, None if model or vocabulary else vocabulary_text(resolved(options)))

    raise typer.Exit(train.reporting_errors(work, options))


def resolved(options: Options) -> Config:
    """The configuration for the world that is asked for, every key as one that was set; for devices that compute in
    bf16."""
    given = Config.load(options.config, options.settings)
    parallel = given.parallel
    fewest = (1 if parallel.dp == "auto" else parallel.dp) * parallel.tp * parallel.pp
    return Config.load(given.model_dump()).resolved(options.ranks or fewest, native_bf16=True)


def _rehearsed(
    options: Options, ranks: list[int], micro_batches: int | None, model: Path | None, vocabulary: int | None
) -> "Rehearsal":
    config = resolved(options)
    if model is None:
        checks.check_code(config, options.allow_code)
    checks.check_schedule(config)
    with _progress():
        job = job_of(config, model, vocabulary, allow_code=options.allow_code)
        from zero3d.dryrun.run import rehearse

        return rehearse(job, ranks, micro_batches)


def job_of(config: Config, model: Path | None, vocabulary: int | None, *, allow_code: bool) -> "Job":
    """What `zero3d train` would run; model: the folder of a Transformers model in place of the configuration's;
    vocabulary: None: that of the data."""
    # Here, not above: what is wrong in the configuration is told before torch is loaded.
    import torch

    from zero3d.dryrun.run import Job
    from zero3d.models.presets import build_function
    from zero3d.tensor.loss import next_token_loss

    length, size = config.data.sequence_length, config.parallel.micro_batch
    assert size is not None, "resolved"
    tokens = torch.zeros(size, length, dtype=torch.long)
    if model is not None:
        from zero3d.models.described import described

        found = described(model, length)
        return Job(
            source=found.build,
            loss=lambda output, batch: next_token_loss(output.logits, batch),
            optimizer=config.optimizer.name,
            config=config,
            batch={"tokens": tokens, "targets": tokens},
            call=found.call,
        )
    vocabulary = checks.vocabulary_of(config) if vocabulary is None else vocabulary
    build = build_function(config.model, vocabulary, length, allow_code=allow_code)
    return Job(
        source=build,
        loss=next_token_loss,
        optimizer=config.optimizer.name,
        config=config,
        batch={"tokens": tokens, "targets": tokens},
    )


def _progress() -> AbstractContextManager[Any]:
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status("rehearsing a step; large models take up to a minute")


def vocabulary_text(config: Config) -> str:
    """Which vocabulary was taken where nobody said one, as much of a model may hang on it."""
    key = "source" if checks.brings_tokens(config) else "tokenizer"
    where = f"that of data.{key} = {json.dumps(getattr(config.data, key))}"
    whose = "" if config.model.path is None else ", if model.path takes one"
    return f"Vocabulary of {checks.vocabulary_of(config):,}, {where}{whose}; --vocabulary rehearses another."


def _show(found: "Rehearsal", options: Options, vocabulary: str | None) -> None:
    from rich.console import Console

    from zero3d.cli.dryrun_tables import parts

    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for part in parts(found, resolved(options)):
        console.print(part, highlight=False, markup=False, emoji=False)
    if vocabulary is not None:
        console.print(vocabulary, highlight=False, markup=False, emoji=False)
