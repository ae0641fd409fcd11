"""A run as the head and the sections of its page. Pure."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from zero3d.cli.style import count
from zero3d.cli.style import size as bytes_text
from zero3d.config import Config
from zero3d.report.bars import bars
from zero3d.report.contents import Run
from zero3d.report.curves import curves
from zero3d.report.figure import Figure
from zero3d.report.gantt import gantt
from zero3d.report.holdings import WORDS, Side, holdings, on_device
from zero3d.report.lines import number
from zero3d.report.markup import Markup, element, table
from zero3d.report.page import STATES, Head, Section, card, folded
from zero3d.report.plan_file import AWAY, KINDS, PlanFile

MOST_RANKS = 64
"""Rows of the table of ranks."""
LEFT_OUT = "left out"


def head_and_sections(run: Run) -> tuple[Head, list[Section]]:
    """What `page.page` writes."""
    problems = list(run.problems)
    line = gantt(run, problems)
    drawn = {figure.name: figure for figure in [*curves(run), *bars(run), *([line] if line else [])]}

    def those(*names: str) -> list[Figure]:
        return [drawn[name] for name in names if name in drawn]

    sections = [
        Section(name="training", title="Loss and speed", figures=those("loss", "throughput", "seconds", "norm", "lr")),
        Section(name="memory-of-ranks", title="Memory", figures=those("memory")),
        Section(name="where-time-went", title="Time", figures=those("timeline", "time", "offload", "sent")),
        Section(name="layout", title="Who holds what", parts=list(_layout(run))),
        Section(name="configuration", title="Configuration", parts=list(_configuration(run))),
        Section(name="checkpoints", title="Checkpoints", parts=list(_checkpoints(run))),
    ]
    notices = [*_state(run), *problems, *run.metrics.notes]
    head = Head(
        title=run.name,
        about=_about(run),
        state=_state_text(run),
        notices=notices,
        facts=list(_facts(run)),
        foot=f"Made by zero3d report from {run.folder}. This page loads nothing from any network.",
    )
    return head, [section for section in sections if section.parts or section.figures]


def _about(run: Run) -> str:
    config, plan, layout = run.config, run.plan, run.layout
    told = []
    if config:
        model = config.model
        told.append(model.preset or model.path or "")
    if plan:
        told.append(f"{count(plan.parameters)} parameters")
    if layout:
        told.append(f"{layout.world} rank{'s' * (layout.world > 1)}: dp {layout.dp} x tp {layout.tp} x pp {layout.pp}")
    if config:
        told.append(f"ZeRO level {config.zero.level}")
        told.append(f"optimizer on the {config.offload.optimizer}" if config.offload.optimizer != "device" else "")
    if plan:
        told.append(f"on {plan.device}")
    return ", ".join(filter(None, told))


def _state_text(run: Run) -> str:
    last, steps = run.metrics.last_step, run.steps
    far = f"step {last:,}" + (f" of {steps:,}" if steps else "") if last else "no step is known"
    return f"{STATES[run.state]}, {far}"


def _state(run: Run) -> Iterator[str]:
    every = run.config.run.log_every if run.config else 1
    since = f" Steps are known every {every:,}, so it may be further." if every > 1 else ""
    if run.state == "running":
        yield f"This run still writes into its folder: the page is of what was there when it was made.{since}"
    elif run.state == "cut short":
        yield (
            "The run did not come to its end, or goes on under a launcher of its own: what is known only at the end "
            f"(held-out loss, measured and sent bytes) is missing.{since}"
        )
    if run.metrics.resumed:
        places = ", ".join(f"{one:,}" for one in run.metrics.resumed)
        yield (
            f"The run was resumed after step {places}. Configuration, layout and plan are those of its last part; "
            "its steps before may have been made by another layout."
        )
    if run.trace and run.layout and run.trace.layout != run.layout:
        traced = f"dp {run.trace.layout.dp} x tp {run.trace.layout.tp} x pp {run.trace.layout.pp}"
        yield f"The trace is of an earlier part of the run, on {traced}: so are the timeline and where the time went."


def _facts(run: Run) -> Iterator[tuple[str, str, str]]:
    steps, done = run.metrics.steps, run.metrics.done or {}
    if steps:
        nats = number(done.get("train_loss")) if run.metrics.done else steps[-1].loss
        when = "the last steps" if run.metrics.done else f"step {steps[-1].number:,}"
        yield "training loss", _number(nats), f"{_unit(run.plan, nats)}, of {when}"
    if math.isfinite(heldout := number(done.get("heldout_loss"))):
        yield "held-out loss", _number(heldout), _unit(run.plan, heldout)
    if math.isfinite(speed := number(done.get("tokens_per_second"))):
        yield "tokens per second", f"{speed:,.0f}", "the mean, the first step left out"
    elif steps and math.isfinite(steps[-1].tokens_per_second):
        yield "tokens per second", f"{steps[-1].tokens_per_second:,.0f}", f"of step {steps[-1].number:,}"
    if run.metrics.last_step:
        of = f"of {run.steps:,}" if run.steps else ""
        yield "steps", f"{run.metrics.last_step:,}", of
    if held := holdings(run):
        side: Side = "measured" if any("measured" in one.sides for one in held) else "planned"
        sizes = [on_device(one.sides[side]) for one in held if side in one.sides]
        if sizes:
            yield "held by a rank", bytes_text(max(sizes)), f"on its device, {WORDS[side]}; the one with most"
    whole = [one for one in run.checkpoints if not one.why]
    if whole:
        yield "newest checkpoint", f"step {whole[0].step:,}", bytes_text(whole[0].size)


def _unit(plan: PlanFile | None, nats: float) -> str:
    """Of a loss, with what it is in bits per byte where that is known."""
    if plan is None or plan.bits_per_nat is None or not math.isfinite(nats):
        return "nats per token"
    return f"nats per token; {nats * plan.bits_per_nat:.3f} bits per byte"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def _layout(run: Run) -> Iterator[Markup]:
    """Each rank's place, blocks and what ZeRO leaves it of them."""
    plan = run.plan
    if plan is None:
        return
    layout = plan.layout
    away = [kind for kind in AWAY if any(plan.held_bytes.get(kind, []))]
    heads = ["rank", "dp", "tp", "pp", "blocks", *KINDS, *away]
    rows = []
    for rank in range(min(layout.world, MOST_RANKS)):
        place = layout.place(rank)
        kept = [_kept(plan, rank, kind) for kind in KINDS]
        there = [bytes_text(plan.held_bytes[kind][rank]) for kind in away]
        indices = map(str, (place.dp, place.tp, place.pp))
        rows.append([f"rank {rank}", *indices, _blocks(plan, place.pp), *kept, *there])
    more = f" The other {layout.world - MOST_RANKS:,} ranks are alike." if layout.world > MOST_RANKS else ""
    about = (
        "Blocks as first-last of each stage. Parts are what ZeRO leaves a rank of what its place on tp and pp gives "
        f"it; bytes are of model states, on the device.{more}"
    )
    dtypes = table("Dtypes", ["what", "dtype"], [list(one) for one in plan.dtypes], numbers=False)
    text = (
        f"{count(plan.train_tokens)} tokens to train on from {plan.documents:,} documents, vocabulary "
        f"{plan.vocabulary:,}; {plan.parameters:,} parameters, {plan.trainable:,} of them trained."
    )
    yield card(
        element("p", about, class_="faint"),
        table("Planned, by rank", heads, rows),
        element("p", text),
        folded("Dtypes", dtypes),
    )


def _kept(plan: PlanFile, rank: int, kind: str) -> str:
    held = plan.held_bytes[kind][rank]
    if not held and any(kind in plan.held_bytes for kind in AWAY):
        return "elsewhere"
    part, parts = plan.part(plan.layout.place(rank), kind)
    return f"{'all' if parts == 1 else f'part {part}/{parts}'}, {bytes_text(held)}"


def _blocks(plan: PlanFile, pp: int) -> str:
    told = [
        ("none" if one is None else f"{one[0]}-{one[1]}" if one[1] > one[0] else f"{one[0]}") for one in plan.stages[pp]
    ]
    return ", ".join(told)


def _configuration(run: Run) -> Iterator[Markup]:
    """What differs from the defaults; then all, folded."""
    if not run.values:
        return
    defaults: dict[str, dict[str, Any]] = Config().model_dump()
    given = run.config.model_dump() if run.config else run.values
    changed, same = [], []
    for section, keys in given.items():
        for key, value in keys.items():
            default = defaults.get(section, {}).get(key)
            row = [f"{section}.{key}", _value(value)]
            if _value(value) != _value(default):
                changed.append([*row, _value(default)])
            else:
                same.append(row)
    yield card(
        table("What differs from the defaults", ["key", "value", "default"], changed, numbers=False),
        folded(
            f"The other {len(same)} keys, as by default", table("As by default", ["key", "value"], same, numbers=False)
        ),
    )


def _value(value: object) -> str:
    """As TOML and JSON write it; tuples and lists alike."""
    return LEFT_OUT if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _checkpoints(run: Run) -> Iterator[Markup]:
    if not run.checkpoints:
        yield card(element("p", f"None was found in {run.checkpoint_place}.", class_="faint"))
        return
    rows: Sequence[Sequence[str]] = [
        [
            one.name,
            "" if one.step is None else f"{one.step:,}",
            f"not whole: {one.why}" if one.why else "whole",
            "" if one.why else bytes_text(one.size),
            one.what,
            one.layout,
        ]
        for one in run.checkpoints
    ]
    yield card(
        table(
            "Newest first; whole by the sizes of its files",
            ["name", "step", "state", "size", "what", "saved by"],
            rows,
            numbers=False,
        )
    )
