"""What `zero3d plan` found, as tables for people and as JSON for programs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero3d.cli.plain_table import PlainTable
from zero3d.cli.plan import Outcome
from zero3d.cli.style import count, size
from zero3d.planner.choice import Choice
from zero3d.planner.footprint import KINDS
from zero3d.planner.hardware import is_preset
from zero3d.planner.judge import Plan, Rejected
from zero3d.planner.least import Smallest
from zero3d.planner.own_error import told
from zero3d.planner.sending import Sent

SHOWN = 6
"""Of the rejected, for each reason."""

LEGEND = (
    "level: of ZeRO, and how often gradients are reduced; batch: micro-batches x samples of one; again: what backward "
    "computes once more; host: what is kept there. memory: of the rank that holds most; bubble: idle in the pipeline, "
    "of the time that it computes; exposed: traffic that nothing hides, of a step; sent, calls: of a rank in a step."
)


def parts(outcome: Outcome) -> Iterator[PlainTable | str]:
    """From the plans down to what was assumed."""
    plans = outcome.found.plans
    if plans:
        yield _plans(outcome)
        yield LEGEND
        yield _memory(outcome)
        yield _where_time_goes(plans[0])
        yield _neighbours(outcome)
    yield _rejected(outcome)
    yield from outcome.assumed
    if outcome.asked.source:
        yield f"Sizes of {outcome.asked.name}: {outcome.asked.source}."
    yield from outcome.asked.notes
    yield _own_error(outcome)


def _own_error(outcome: Outcome) -> str:
    return told(preset=is_preset(outcome.aim.cluster))


def _plans(outcome: Outcome) -> PlainTable:
    devices, name = outcome.aim.devices, outcome.aim.cluster.device.name
    table = PlainTable(
        f"{outcome.asked.name} on {devices} x {name}",
        ["dp x tp x pp", "schedule", "level", "batch", "again", "host"],
        ["memory", "tokens/s", "MFU", "bubble", "exposed", "sent", "calls"],
        drop=["exposed", "bubble", "calls", "sent", "schedule"],
    )
    for plan in outcome.found.plans:
        choice, time = plan.choice, plan.time
        table.add_row(
            f"{choice.dp} x {choice.tp} x {choice.pp}",
            "-" if choice.pp == 1 else choice.told()["schedule"],
            _level(choice),
            f"{choice.micro_batches} x {choice.micro_batch}",
            choice.recompute,
            choice.offload,
            size(plan.footprint.total),
            count(time.tokens_per_second),
            f"{time.mfu:.1%}",
            f"{time.bubble:.1%}",
            f"{time.exposed / time.seconds:.1%}",
            *_sent(plan.sent),
            style="bold" if plan is outcome.found.plans[0] else None,
        )
    return table


def _level(choice: Choice) -> str:
    """Such as `3, a step, kept`."""
    level = f"{choice.level}, a {choice.reduce}" if choice.level else "0"
    return f"{level}, kept" if choice.keep_gathered else level


def _memory(outcome: Outcome) -> PlainTable:
    numbers = [*KINDS, "host", "of it pinned", "of a machine"]
    words = ["dp x tp x pp", "level", "batch", "again"]
    drop = ["of it pinned", "of a machine", "again", "batch"]
    table = PlainTable("Memory of the rank that holds most, by kind", words, numbers, drop=drop)
    ranks = min(outcome.aim.cluster.per_node, outcome.aim.devices)
    for plan in outcome.found.plans:
        choice, held = plan.choice, plan.footprint
        table.add_row(
            f"{choice.dp} x {choice.tp} x {choice.pp}",
            _level(choice),
            f"{choice.micro_batches} x {choice.micro_batch}",
            choice.recompute,
            *(size(held.by_kind[kind]) for kind in KINDS),
            *(
                size(number) if held.host_bytes else "-"
                for number in (held.host_bytes, _pinned(plan), held.host_bytes * ranks)
            ),
        )
    return table


def _where_time_goes(best: Plan) -> PlainTable:
    from zero3d.planner.neighbours import CAUSES

    table = PlainTable(f"A step of the best: {best.time.seconds:.3g} s", ["what"], ["seconds", "part"], drop=[])
    for name, text in CAUSES.items():
        value: float = getattr(best.time, name)
        if value > 0:
            table.add_row(text, f"{value:.3g}", f"{value / best.time.seconds:.1%}")
    return table


def _neighbours(outcome: Outcome) -> PlainTable:
    numbers = ["tokens/s", "memory", "sent", "calls"]
    table = PlainTable("One setting changed", ["setting"], numbers, ["why it lost"], drop=["memory"])
    for one in outcome.around:
        if isinstance(one.found, Plan):
            cells = [count(one.found.time.tokens_per_second), size(one.found.footprint.total)]
        else:
            cells = ["-", _number(one.found) if one.found.unit == "bytes" else "-"]
        table.add_row(one.change, *cells, *_sent(one.sent), one.reason)
    return table


def _sent(sent: Mapping[str, Sent]) -> tuple[str, str]:
    """(bytes, calls) of a step, over all axes."""
    total = sum(sent.values(), Sent())
    return (size(total.num_bytes), f"{total.calls:,}") if sent else ("-", "-")


def _rejected(outcome: Outcome) -> PlainTable:
    counts = outcome.found.counts
    told_counts = ", ".join(f"{number:,} {why}" for why, number in counts.most_common())
    words, numbers = ["dp x tp x pp", "why", "the nearest of them"], ["choices", "number"]
    table = PlainTable(f"Rejected: {told_counts or 'none'}", words, numbers, drop=[])
    for why in counts:
        found = [one for one in outcome.found.rejected if one.why == why]
        # What failed by its host alone, of which a device has enough, is nearer than what failed by the device.
        found.sort(key=lambda one: (one.unit != "host bytes", -one.number if why == "slower" else one.number))
        by_layout: dict[str, list[Rejected]] = {}
        for one in found:
            by_layout.setdefault(" x ".join(str(one.choice[axis]) for axis in ("dp", "tp", "pp")), []).append(one)
        for layout, same in list(by_layout.items())[:SHOWN]:
            table.add_row(layout, why, same[0].reason, f"{len(same):,}", _number(same[0]))
    return table


def _number(one: Rejected) -> str:
    if "bytes" in one.unit:
        return size(one.number)
    return f"{count(one.number)} {one.unit}"


def as_event(outcome: Outcome, out: Path | None) -> dict[str, Any]:
    """What programs read: design's keys first, then more."""
    least = outcome.least
    return {
        "plans": [_as_plan(plan) for plan in outcome.found.plans],
        "rejected": [
            {**one.choice, "why": one.why, "reason": one.reason, "number": one.number, "unit": one.unit}
            for one in outcome.found.rejected
        ],
        "neighbours": [
            {
                "change": one.change,
                "reason": one.reason,
                "tokens_per_second": one.found.time.tokens_per_second if isinstance(one.found, Plan) else None,
                "peak_bytes": one.found.footprint.total if isinstance(one.found, Plan) else None,
                "number": one.found.number if not isinstance(one.found, Plan) else None,
                **_as_sent(one.sent),
            }
            for one in outcome.around
        ],
        "model": outcome.asked.name,
        "devices": outcome.aim.devices,
        "device": outcome.aim.cluster.device.name,
        "device_bytes": outcome.aim.memory,
        "sequence": outcome.sequence,
        "global_batch": outcome.aim.global_batch,
        "least": None if least is None or least.smallest is None else _as_least(least.smallest),
        "ways": [] if least is None else [{"what": what, **_as_least(found)} for what, found in least.ways],
        "assumed": [*outcome.assumed, *outcome.asked.notes, _own_error(outcome)],
        "config": None if out is None or not outcome.configs else str(out),
    }


def _as_plan(plan: Plan) -> dict[str, Any]:
    choice, time, held = plan.choice, plan.time, plan.footprint
    return {
        "layout": {"dp": choice.dp, "tp": choice.tp, "pp": choice.pp},
        "level": choice.level,
        "micro_batch": choice.micro_batch,
        "schedule": choice.schedule,
        "recompute": choice.recompute,
        "offload": choice.offload,
        "peak_bytes": held.total,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "bubble": time.bubble,
        "micro_batches": choice.micro_batches,
        "stages_per_rank": choice.stages_per_rank,
        "reduce": choice.reduce,
        "keep_gathered": choice.keep_gathered,
        "sequence_parallel": choice.sequence_parallel,
        "seconds": time.seconds,
        "exposed_seconds": time.exposed,
        "peak_by_kind": dict(held.by_kind),
        "host_bytes": held.host_bytes,
        "host_pinned_bytes": _pinned(plan),
        **_as_sent(plan.sent),
    }


def _as_sent(sent: Mapping[str, Sent]) -> dict[str, Any]:
    """Of a step of the pipeline's first rank, by axis."""
    return {
        "sent_bytes": {axis: one.num_bytes for axis, one in sent.items()},
        "calls": {axis: one.calls for axis, one in sent.items()},
    }


def _pinned(plan: Plan) -> int:
    return 0 if plan.footprint.host is None else plan.footprint.host.staging


def _as_least(found: Smallest) -> dict[str, Any]:
    choice = found.choice
    return {
        "layout": {"dp": choice.dp, "tp": choice.tp, "pp": choice.pp},
        "level": choice.level,
        "offload": choice.offload,
        "peak_bytes": found.footprint.total,
        "host_bytes": found.host_bytes,
        "fits": found.fits,
    }
