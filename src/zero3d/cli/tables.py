"""What is shown before a run, as rich tables and panels. Nothing here prints; results.py is for after it."""

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zero3d.cli.plain_table import PlainTable
from zero3d.cli.style import count, size
from zero3d.planner.memory import LEVELS

if TYPE_CHECKING:
    from zero3d.train import Plan

SHARDED = ("nothing", "optimizer state", "+ gradients", "+ parameters")
BAR = " "
"""The heading of a column of bars."""
LEVEL_BAR = 6
MOST_RANKS = 8
"""Rows of a table of ranks; the others are alike."""


def what_will_run(plan: "Plan") -> RenderableType:
    """The resolved configuration in sentences; config.toml of the run's folder has every key."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in _sentences(plan).items():
        if text:
            # Text: what a user has named must not be read as markup, nor ":o:" in it as a picture.
            grid.add_row(name, Text(text))
    return Panel(grid, title=Text(plan.config.run.name, "bold"), title_align="left", border_style="cyan")


def _sentences(plan: "Plan") -> dict[str, str]:
    config = plan.config
    data, zero = config.data, config.zero
    tokens = data.global_batch * data.sequence_length
    parts = [f"{plan.world} rank{'s' * (plan.world > 1)}", f"{config.parallel.micro_batch}"]
    if config.micro_batches > 1:
        parts.insert(1, f"{config.micro_batches} micro-batches")
    return {
        "model": _model(plan),
        "text": f"{data.source}: {plan.documents:,} documents, {count(plan.train_tokens)} tokens to "
        f"train on, vocabulary {plan.vocabulary:,}",
        "step": f"{data.global_batch} samples = {' x '.join(parts)}, of {data.sequence_length} tokens: "
        f"{tokens:,} tokens",
        "training": f"{_steps(plan)}, {count(tokens * config.num_steps)} tokens",
        "optimizer": _optimizer(plan),
        "layout": f"dp {plan.world} x tp {config.parallel.tp} x pp {config.parallel.pp}, on {plan.device}",
        "ZeRO": f"level {zero.level}, gradients reduced once a {zero.reduce}, "
        + ("overlapping backward" if zero.overlap else "not overlapped")
        + (f", sharded {_in_groups(plan)}" if zero.replicas > 1 else "")
        + (f", recompute {config.recompute.mode}" if config.recompute.mode != "none" else ""),
        "dtypes": _dtypes(plan),
        "note": plan.notice,
        "files": f"{config.run.out}/",
    }


def _in_groups(plan: "Plan") -> str:
    replicas = plan.config.zero.replicas
    return f"in {replicas} groups of {plan.world // replicas} ranks"


def _steps(plan: "Plan") -> str:
    taken, scheduled = plan.config.num_steps, plan.config.run.steps
    return f"{taken:,} of {scheduled:,} steps" if taken < scheduled else f"{taken:,} steps"


def _model(plan: "Plan") -> str:
    model, frozen = plan.config.model, plan.parameters - plan.trainable
    parts = [f"{count(plan.parameters)} parameters" + (f", {count(frozen)} of them frozen" if frozen else "")]
    if model.preset:
        parts.insert(0, f"{model.layers} blocks of width {model.width}, {model.heads} heads")
    return f"{model.preset or model.path}: {', '.join(parts)}"


def _optimizer(plan: "Plan") -> str:
    options = plan.config.optimizer
    parts = [options.name, f"lr {options.lr:g}"]
    if options.warmup:
        parts.append(f"{options.warmup} steps warm-up")
    if options.schedule != "constant":
        parts.append(f"{options.schedule} to {options.lr * options.final_lr:g}")
    if options.clip_norm:
        parts.append(f"norm clipped at {options.clip_norm:g}")
    return ", ".join(parts)


def _dtypes(plan: "Plan") -> str:
    """Grouped by dtype: `float32: weights, held gradients; ...`."""
    by_dtype: dict[str, list[str]] = {}
    for what, dtype in plan.dtypes:
        by_dtype.setdefault(dtype, []).append(what)
    return "\n".join(f"{dtype}: {', '.join(kinds)}" for dtype, kinds in by_dtype.items())


def who_holds_what(plan: "Plan") -> PlainTable:
    """Per rank: which part of each kind of model state, and its bytes."""
    dp, size_of_group = plan.world, plan.world // plan.config.zero.replicas
    whole, mine = plan.predicted[0], plan.predicted[plan.config.zero.level]
    parts = ["weights", "gradients", "optimizer state"]
    drop = ["model states", *parts[:2]]
    table = PlainTable("Who holds what", ["rank"], [*parts, "model states"], drop=drop)

    def part(rank: int, held: int, of: int) -> str:
        return f"{'all' if held == of else f'part {rank % size_of_group + 1}/{size_of_group}'}  {size(held):>7}"

    for rank in range(dp if dp <= MOST_RANKS else MOST_RANKS - 2):
        table.add_row(
            f"{rank}",
            part(rank, mine.weights, whole.weights),
            part(rank, mine.gradients, whole.gradients),
            part(rank, mine.optimizer, whole.optimizer),
            size(mine.total),
        )
    if dp > MOST_RANKS:
        table.add_row(f".. {dp - 1}", *["and so on"] * 3, size(mine.total))
    return table


def levels(plan: "Plan") -> PlainTable:
    """Predicted model states per rank at levels 0 to 3; the level of this run is marked."""
    groups = f" {_in_groups(plan)}" if plan.config.zero.replicas > 1 else ""
    table = PlainTable(
        f"Predicted model states per rank at each ZeRO level, dp {plan.world}{groups}",
        ["level", "shards"],
        ["weights", "gradients", "optimizer", "total"],
        [BAR],
        drop=[BAR, "shards", "gradients", "optimizer", "weights"],
    )
    most = max(states.total for states in plan.predicted)
    for level, states in zip(LEVELS, plan.predicted, strict=True):
        chosen = level == plan.config.zero.level
        numbers = [states.weights, states.gradients, states.optimizer, states.total]
        table.add_row(
            f"{'▸' if chosen else ' '} {level}",
            SHARDED[level],
            *map(size, numbers),
            bar(states.total / most, LEVEL_BAR),
            style="bold green" if chosen else None,
        )
    return table


def bar(part: float, width: int) -> str:
    return "█" * max(round(part * width), 1)
