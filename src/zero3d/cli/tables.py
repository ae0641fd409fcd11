"""What is shown before a run, as rich tables and panels. Nothing here prints; results.py is for after it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zero3d.cli.offload_tables import by_place, home_of, offloads, places, what_is_offloaded
from zero3d.cli.plain_table import PlainTable
from zero3d.cli.style import count, size
from zero3d.config import Config
from zero3d.layout import AXES, Layout, Place
from zero3d.planner.bubble import bubble, num_stages
from zero3d.planner.memory import LEVELS, ModelStates

if TYPE_CHECKING:
    from zero3d.train import Plan

SHARDED = ("nothing", "optimizer state", "+ gradients", "+ parameters")
BAR = " "
"""The heading of a column of bars."""
LEVEL_BAR = 6
KINDS = ("weights", "gradients", "optimizer")
"""Of model states, as `ModelStates` has them."""
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
    dp = layout_of(config).dp
    ranks = f"{dp} rank{'s' * (dp > 1)}" if dp == plan.world else f"dp {dp}"
    samples, micro_batches = data.global_batch // dp, config.micro_batches
    micro_batch = config.parallel.micro_batch or samples
    parts = f"{ranks} x {f'{micro_batches} micro-batches x ' * (micro_batches > 1)}{micro_batch}"
    if samples % micro_batch:  # The last one is smaller.
        parts = f"{ranks} x {samples}, in {micro_batches} micro-batches of at most {micro_batch}"
    return {
        "model": _model(plan),
        "text": f"{data.source}: {plan.documents:,} documents, {count(plan.train_tokens)} tokens to "
        f"train on, vocabulary {plan.vocabulary:,}",
        "step": f"{data.global_batch} samples = {parts}, of {data.sequence_length} tokens: {tokens:,} tokens",
        "training": f"{_steps(plan)}, {count(tokens * config.num_steps)} tokens",
        "optimizer": _optimizer(plan),
        "pipeline": _pipeline(plan),
        "layout": f"{layout_text(config)}, on {plan.device}"
        + (", sequence parallel" if config.parallel.sequence_parallel else ""),
        "ZeRO": f"level {zero.level}, gradients reduced once a {zero.reduce}, "
        + ("overlapping backward" if zero.overlap else "not overlapped")
        + (f", sharded {_in_groups(config)}" if zero.replicas > 1 else "")
        + (f", recompute {config.recompute.mode}" if config.recompute.mode != "none" else ""),
        "offload": what_is_offloaded(config),
        "dtypes": _dtypes(plan),
        "note": plan.notice,
        "files": f"{config.run.out}/",
    }


def _pipeline(plan: "Plan") -> str:
    """Stages, schedule, micro-batches and the bubble; nothing without stages."""
    config = plan.config
    number = num_stages(config)
    if number == 1:
        return ""
    each = "; ".join(f"pp {pp} {blocks_text(blocks)}" for pp, blocks in enumerate(plan.stages[:MOST_RANKS]))
    more = f"; .. pp {len(plan.stages) - 1}" if len(plan.stages) > MOST_RANKS else ""
    return f"{number} stages: {each}{more}\n{schedule_text(config)}"


def schedule_text(config: Config) -> str:
    """Such as `1f1b of 8 micro-batches, bubble 12.5% (simulated)`."""
    count = config.micro_batches
    named = f"{config.parallel.schedule} of {count} micro-batch{'es' * (count > 1)}"
    return f"{named}, bubble {bubble(config):.1%} (simulated)"


def blocks_text(stages: Sequence[range]) -> str:
    """Of a rank's stages, such as `L0-L7` or `L0, L3`."""
    return ", ".join(_blocks(one) for one in stages)


def _blocks(blocks: range) -> str:
    if not blocks:
        return "no blocks"
    return f"L{blocks[0]}" + (f"-L{blocks[-1]}" if len(blocks) > 1 else "")


def layout_of(config: Config) -> Layout:
    """Of a resolved configuration."""
    parallel = config.parallel
    assert parallel.dp != "auto", "resolved"
    return Layout(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp)


def layout_text(config: Config) -> str:
    """Such as `dp 2 x tp 2 x pp 1`."""
    return " x ".join(f"{axis} {getattr(layout_of(config), axis)}" for axis in AXES)


def _in_groups(config: Config) -> str:
    replicas = config.zero.replicas
    return f"in {replicas} groups of {layout_of(config).dp // replicas} ranks"


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


def who_holds_what(config: Config, predicted: Sequence[Sequence[ModelStates]]) -> PlainTable:
    """Per rank: which part of each kind of model state, and its bytes on the device, or its home where that has all of
    it. Parts are of what tp and pp have left the rank.

    predicted: for each pp index the model states at levels 0 to 3
    """
    layout = layout_of(config)
    kinds = ["weights", "gradients", "optimizer state"]
    axes = [axis for axis in AXES if layout.world > layout.dp and getattr(layout, axis) > 1]
    where = places(config)
    drop = [*kinds[:2]] if offloads(config) else [*where, *kinds[:2]]
    title = "Who holds what" + (" of the model's part that its rank has" if axes else "")
    title += ", with bytes on the device" if offloads(config) else ""
    table = PlainTable(title, ["rank", *axes], [*kinds, *where], drop=drop)
    for rank in range(layout.world if layout.world <= MOST_RANKS else MOST_RANKS - 2):
        place = layout.place(rank)
        whole, mine = predicted[place.pp][0], predicted[place.pp][config.zero.level]
        cells = []
        for kind in KINDS:
            held = getattr(mine, kind)
            told = size(held) if held or not offloads(config) else home_of(config, kind)
            cells.append(f"{_part(*part_of(config, place, held, getattr(whole, kind)))}  {told:>7}")
        table.add_row(f"{rank}", *(f"{getattr(place, axis)}" for axis in axes), *cells, *by_place(config, mine))
    if layout.world > MOST_RANKS:
        last = predicted[layout.pp - 1][config.zero.level]
        table.add_row(f".. {layout.world - 1}", *[".."] * len(axes), *["and so on"] * 3, *by_place(config, last))
    return table


def part_of(config: Config, place: Place, held: int, whole: int) -> tuple[int, int]:
    """(number, parts): which part of something a rank at `place` keeps that holds so many of its `whole` bytes."""
    group = layout_of(config).dp // config.zero.replicas
    return (1, 1) if held == whole else (place.dp % group + 1, group)


def _part(number: int, parts: int) -> str:
    return "all" if parts == 1 else f"part {number}/{parts}"


def levels(plan: "Plan") -> PlainTable:
    """Predicted model states per rank at levels 0 to 3, of the pp index that holds most; the run's level is marked."""
    groups = f" {_in_groups(plan.config)}" if plan.config.zero.replicas > 1 else ""
    pp = max(range(len(plan.predicted)), key=lambda pp: plan.predicted[pp][plan.config.zero.level].total)
    who = "per rank" if len(plan.predicted) == 1 else f"of ranks at pp {pp}, which hold most,"
    predicted = plan.predicted[pp]
    totals = places(plan.config) if offloads(plan.config) else ["total"]
    table = PlainTable(
        f"Predicted model states {who} at each ZeRO level, {axes_text(plan.config)}{groups}",
        ["level", "shards"],
        ["weights", "gradients", "optimizer", *totals],
        [BAR],
        drop=[BAR, "shards", "gradients", "optimizer", "weights"],
    )
    # What is offloaded frees the device, whose share the bars are of.
    most = max(states.device for states in predicted)
    for level, states in zip(LEVELS, predicted, strict=True):
        chosen = level == plan.config.zero.level
        numbers = [states.weights, states.gradients, states.optimizer]
        table.add_row(
            f"{'▸' if chosen else ' '} {level}",
            SHARDED[level],
            *map(size, numbers),
            *by_place(plan.config, states),
            bar(states.device / most if most else 0, LEVEL_BAR),
            style="bold green" if chosen else None,
        )
    return table


def axes_text(config: Config) -> str:
    """The layout without axes of size 1, but for dp."""
    sizes = {axis: getattr(layout_of(config), axis) for axis in AXES}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "dp")


def bar(part: float, width: int) -> str:
    return "█" * max(round(part * width), 1)
