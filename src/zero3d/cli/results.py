"""What is shown after a run: what was learned, what was held, a sample, and what to try next."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from zero3d.cli.offload_tables import split_text
from zero3d.cli.plain_table import PlainTable
from zero3d.cli.style import count, seconds, size
from zero3d.cli.suggest import Suggestion
from zero3d.cli.tables import BAR, MOST_RANKS, bar, layout_of
from zero3d.cli.tables import KINDS as STATES
from zero3d.layout import Place
from zero3d.records import TIMELINE

if TYPE_CHECKING:
    from zero3d.train import Plan, Summary

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers", "host", "disk", "staging")
NAMES = {"host": "on the host", "disk": "on disk", "staging": "staging"}
"""Of kinds that are not on the device."""
BITS_BAR, LOSS_LINE = 24, 48


def how_it_went(summary: "Summary", losses: Sequence[float]) -> Text:
    """Steps, time and speed of this start, and the course of the loss."""
    data, steps = summary.plan.config.data, len(losses)
    tokens = data.global_batch * data.sequence_length * steps
    in_all = f" ({summary.steps:,} in all)" if steps < summary.steps else ""
    scale, unit = loss_unit(summary.plan)
    split = f"on average {split_text(summary.offload)}" if summary.offload else ""
    return Text.assemble(
        ("Done  ", "bold green"),
        f"{steps:,} steps{in_all}, {count(tokens)} tokens in {seconds(summary.seconds)}, "
        f"{summary.tokens_per_second:,.0f} tokens/s\n",
        ("Loss  ", "bold"),
        f"{losses[0] * scale:.3f} ",
        (sparkline(losses, LOSS_LINE), "cyan"),
        f" {losses[-1] * scale:.3f} {unit}",
        ("\nStep  " if split else "", "bold"),
        split,
    )


def what_was_traced(summary: "Summary") -> list[Text]:
    """Where the trace is and what opens it; nothing without one."""
    if summary.trace is None:
        return []
    told = f"{summary.trace} for ui.perfetto.dev, {summary.trace.with_name(TIMELINE)} planned beside measured"
    return [Text.assemble(("Trace ", "bold"), told), Text()]


def what_was_saved(summary: "Summary") -> list[Text]:
    """Where the last checkpoint is; nothing without one."""
    if summary.checkpoint is None:
        return []
    return [Text.assemble(("Saved ", "bold"), f"{summary.checkpoint}"), Text()]


def loss_unit(plan: "Plan") -> tuple[float, str]:
    """What a loss in nats is multiplied by to be shown, and the unit it has then; the same on all of the screen."""
    bits = plan.bits_per_nat
    return (1.0, "nats/token") if bits is None else (bits, "bits/byte")


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in up to `width` characters, each the mean of its part."""
    values = [one for one in values if math.isfinite(one)]
    parts = min(width, len(values))
    if not parts:
        return ""
    means = []
    for number in range(parts):
        part = values[number * len(values) // parts : (number + 1) * len(values) // parts]
        means.append(sum(part) / len(part))
    low, high, ticks = min(means), max(means), "▁▂▃▄▅▆▇█"
    return "".join(ticks[round((one - low) / ((high - low) or 1) * (len(ticks) - 1))] for one in means)


def what_was_learned(summary: "Summary") -> RenderableType:
    """Bits per byte against models that only count, or nats per token where bytes are not known."""
    bits, last = summary.bits, summary.last_steps
    training = f"last {last} training steps" if last > 1 else "the one training step"
    if bits is None:
        return Text(
            f"Loss in nats/token: {summary.heldout_loss:.3f} on held-out text, {summary.train_loss:.3f} {training}",
            style="bold",
        )
    rows = [(f"byte model of order {order}", value) for order, value in sorted(bits.orders.items())]
    rows += [("this model", bits.heldout), (training, bits.train)]
    table = PlainTable("Bits per byte of held-out text: fewer is better", [""], ["bits/byte"], [BAR], drop=[BAR])
    most = max(value for _, value in rows)
    for name, value in rows:
        style = {"this model": "bold green", training: "dim"}.get(name)
        table.add_row(name, f"{value:.3f}", bar(value / most, BITS_BAR), style=style)
    return Group(table, _verdict(bits.heldout, bits.orders, summary.plan))


def _verdict(mine: float, orders: dict[int, float], plan: "Plan") -> Text:
    if not orders:
        return Text("")
    order, best = min(orders.items(), key=lambda one: one[1])
    share = abs(mine - best) / best
    if mine < best:
        return Text(f" The model wins: {share:.0%} fewer bits than the byte model of order {order}.", "green")
    config = plan.config
    longer = (
        f"train all {config.run.steps:,} steps" if config.num_steps < config.run.steps else "train longer (run.steps)"
    )
    return Text(f" The byte model of order {order} wins by {share:.0%}: {longer}.", "yellow")


def what_was_held(summary: "Summary") -> PlainTable:
    """Bytes that each rank really held after the last step, by kind, and what was predicted."""
    kinds = [kind for kind in KINDS if any(summary.held_bytes.get(kind, []))]
    sent = summary.sent_bytes or {"": [0] * summary.plan.world}
    over = [f"sent over {axis}" if len(sent) > 1 or axis not in ("", "dp") else "sent" for axis in sent]
    heads = [NAMES.get(kind, kind) for kind in kinds]
    drop = ["buffers", "activations", *over, NAMES["staging"], "gradients", "optimizer"]
    table = PlainTable("Bytes held by each rank, and sent in a step", ["rank"], [*heads, *over], drop=drop)
    ranks = min(summary.plan.world, MOST_RANKS)
    for rank in range(ranks):
        held = [size(summary.held_bytes[kind][rank]) for kind in kinds]
        table.add_row(str(rank), *held, *(size(by_rank[rank]) for by_rank in sent.values()))
    by_pp = [each[summary.plan.config.zero.level] for each in summary.plan.predicted]
    for pp, states in enumerate(by_pp[:MOST_RANKS]):
        known = {kind: getattr(states, kind) for kind in STATES} | _held_there(summary.plan, pp)
        predicted = [size(known[kind]) if kind in known else "" for kind in kinds]
        name = f"predicted, pp {pp}" if len(by_pp) > 1 else "predicted"
        table.add_row(name, *predicted, *[""] * len(over), style="dim")
    return table


def _held_there(plan: "Plan", pp: int) -> dict[str, int]:
    """What the plan says that the first rank of an index on pp holds away from its device."""
    first = layout_of(plan.config).rank(Place(dp=0, tp=0, pp=pp))
    return next((one.needs[first].held for one in plan.host_needs if first in one.needs), {})


def sample(summary: "Summary") -> RenderableType:
    """How the model goes on from the first words of the held-out text."""
    text = Text.assemble((_printable(summary.prompt), "dim"), _printable(summary.sample))
    words = " ".join(summary.prompt.split()[-3:])
    title = f"A sample: the model goes on after “{_printable(words)}”"
    return Panel(text, title=Text(title), title_align="left", border_style="cyan")


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() or one in "\n\t" else "·" for one in text).expandtabs(4)


def what_next(found: Sequence[Suggestion]) -> list[Text]:
    """Commands to go on with, one a line; to be printed with `soft_wrap`, so that they can be copied whole."""
    lines = [Text("What to try next", style="bold")] if found else []
    for why, command in found:
        lines += [Text(f"  # {why}", style="dim"), Text(f"  {command}")]
    return lines
