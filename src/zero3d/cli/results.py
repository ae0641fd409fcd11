"""What is shown after a run: what was learned, what was held, a sample, and what to try next."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zero3d.cli.style import count, seconds, size
from zero3d.cli.tables import MOST_RANKS, bar, plain_table

if TYPE_CHECKING:
    from zero3d.train import Plan, Summary

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")
BITS_BAR, LOSS_LINE = 24, 48


def how_it_went(summary: "Summary", losses: Sequence[float]) -> Text:
    """Steps, time and speed, and the course of the loss."""
    data = summary.plan.config.data
    tokens = data.global_batch * data.sequence_length * summary.steps
    return Text.assemble(
        ("Done  ", "bold green"),
        f"{summary.steps:,} steps, {count(tokens)} tokens in {seconds(summary.seconds)}, "
        f"{summary.tokens_per_second:,.0f} tokens/s\n",
        ("Loss  ", "bold"),
        f"{losses[0]:.2f} ",
        (sparkline(losses, LOSS_LINE), "cyan"),
        f" {losses[-1]:.2f} nats per token",
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in up to `width` characters, each the mean of its part."""
    parts = min(width, len(values))
    means = []
    for number in range(parts):
        part = values[number * len(values) // parts : (number + 1) * len(values) // parts]
        means.append(sum(part) / len(part))
    low, high, ticks = min(means), max(means), "▁▂▃▄▅▆▇█"
    return "".join(ticks[round((one - low) / ((high - low) or 1) * (len(ticks) - 1))] for one in means)


def what_was_learned(summary: "Summary") -> RenderableType:
    """Bits per byte against models that only count, or nats per token where bytes are not known."""
    bits = summary.bits
    if bits is None:
        return Text(
            f"Nats per token: {summary.train_loss:.3f} on training text (the last steps), "
            f"{summary.heldout_loss:.3f} on held-out text",
            style="bold",
        )
    rows = [(f"byte model of order {order}", value) for order, value in sorted(bits.orders.items())]
    rows += [("this model", bits.heldout), ("this model, training text", bits.train)]
    table = plain_table("Bits per byte of held-out text: fewer is better", [""], ["bits"], [""])
    most = max(value for _, value in rows)
    for name, value in rows:
        style = {"this model": "bold green", "this model, training text": "dim"}.get(name)
        table.add_row(name, f"{value:.3f}", bar(value / most, BITS_BAR), style=style)
    return Group(table, _verdict(bits.heldout, bits.orders))


def _verdict(mine: float, orders: dict[int, float]) -> Text:
    if not orders:
        return Text("")
    order, best = min(orders.items(), key=lambda one: one[1])
    share = abs(mine - best) / best
    if mine < best:
        return Text(f" The model wins: {share:.0%} fewer bits than the byte model of order {order}.", "green")
    return Text(f" The byte model of order {order} wins by {share:.0%}: train longer (run.steps).", "yellow")


def what_was_held(summary: "Summary") -> Table:
    """Bytes that each rank really held after the last step, by kind, and what was predicted."""
    kinds = [kind for kind in KINDS if any(summary.held_bytes.get(kind, []))]
    table = plain_table("Bytes held by each rank, and sent in a step", ["rank"], [*kinds, "sent"])
    sent = [sum(axes) for axes in zip(*summary.sent_bytes.values(), strict=True)]
    ranks = min(summary.plan.world, MOST_RANKS)
    for rank in range(ranks):
        held = [size(summary.held_bytes[kind][rank]) for kind in kinds]
        table.add_row(str(rank), *held, size(sent[rank] if sent else 0))
    states = summary.plan.predicted[summary.plan.config.zero.level]
    predicted = [size(getattr(states, kind)) if hasattr(states, kind) else "" for kind in kinds]
    table.add_row("predicted", *predicted, "", style="dim")
    return table


def sample(summary: "Summary") -> RenderableType:
    """How the model goes on from the first words of the held-out text."""
    text = Text.assemble((_printable(summary.prompt), "dim"), _printable(summary.sample))
    words = " ".join(summary.prompt.split()[-3:])
    title = f"A sample: the model goes on after “{_printable(words)}”"
    return Panel(text, title=Text(title), title_align="left", border_style="cyan")


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() or one in "\n\t" else "·" for one in text).expandtabs(4)


def what_next(config_path: str, plan: "Plan") -> RenderableType:
    """Three commands to go on with."""
    other, twice = 3 if plan.config.zero.level != 3 else 1, plan.world * 2
    sharded = "parameters sharded too" if other == 3 else "the optimizer state alone sharded"
    rows = [(f"the same losses, {sharded}", f"--set zero.level={other}")]
    if plan.config.data.global_batch % twice == 0:
        rows.append(("the same training on twice the ranks", f"--set parallel.dp={twice}"))
    else:
        rows.append(("the same losses, fewer activations held", "--set recompute.mode=block"))
    steps, out = plan.config.num_steps * 4, plan.config.run.out
    rows.append(("four times the training", f"--set run.steps={steps} --set run.out={out}-long"))
    lines = [Text("What to try next", style="bold")]
    for why, settings in rows:
        # Never broken by us, so that it can be copied from any window.
        command = Text(f"  zero3d train {config_path} {settings}", no_wrap=True, overflow="ignore")
        lines += [Text(f"  # {why}", style="dim"), command]
    return Group(*lines)
