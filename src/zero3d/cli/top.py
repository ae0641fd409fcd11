"""`zero3d top RUN`: follows a run in the terminal, from its folder alone. Starts no ranks and loads no torch."""

import json
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zero3d.cli.options import AsJson
from zero3d.cli.reporting import reporting_errors
from zero3d.cli.results import sparkline
from zero3d.cli.style import count, seconds, size

if TYPE_CHECKING:
    from zero3d.report.following import Now

EVERY = 1.0
"""Seconds between two looks."""
COURSE, BUSY = 40, 24
"""Columns of the course of the loss, and of the ranks' bars."""
MOST_RANKS = 16
STYLES = {
    "running": "green",
    "starting": "cyan",
    "late": "yellow",
    "done": "green",
    "stopped": "yellow",
    "ended": "red",
}


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/demo.")],
    once: Annotated[bool, typer.Option("--once", help="Look once, print it and leave.")] = False,
    as_json: AsJson = False,
) -> None:
    """Follow a run: loss, speed, memory, what ranks send and wait for. q or Ctrl-C leaves; the run goes on."""

    def work() -> None:
        _work(run, once=once, as_json=as_json)

    raise typer.Exit(reporting_errors(work, as_json=as_json))


def _work(path: Path, *, once: bool, as_json: bool) -> None:
    from zero3d.report import places
    from zero3d.report.following import look

    folder = places.find(path)
    try:
        if as_json:
            while True:
                now = look(folder, time.time())
                print(json.dumps(now.as_dict()), flush=True)
                if once or now.state in ("done", "stopped", "ended"):
                    return
                time.sleep(EVERY)
        console = Console()
        if once or not console.is_terminal:
            console.print(picture(look(folder, time.time())))
            return
        with _keys() as quits, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(look(folder, time.time()), keys="q leaves; the run goes on"), refresh=True)
                if quits(EVERY):
                    return
    except KeyboardInterrupt:
        return


def picture(now: "Now", keys: str = "") -> RenderableType:
    """All that is known, in 80 columns."""
    head = Text.assemble((f"{now.run}  ", "bold"), (f"{_state(now)}", STYLES[now.state]), f"  {now.layout}")
    parts: list[RenderableType] = [head]
    if now.told:
        parts.append(Text(now.told, "yellow"))
    if now.steps:
        parts.append(ProgressBar(total=now.steps, completed=now.step))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, told in _facts(now):
        facts.add_row(name, told)
    parts.append(facts)
    if now.busy_seconds or any(now.memory_bytes):
        parts.append(_ranks(now))
    for notice in now.notices:
        parts.append(Text(f"! step {notice.get('step')}: {notice.get('message')}", "yellow"))
    if keys:
        parts.append(Text(keys, "dim"))
    return Group(*parts)


def _state(now: "Now") -> str:
    silent = seconds(now.silent_seconds) if now.silent_seconds is not None else ""
    return {
        "late": f"running, but no step for {silent}",
        "ended": f"ended without a last word, {silent} ago",
        "starting": "starting",
    }.get(now.state, now.state)


def _facts(now: "Now") -> Iterator[tuple[str, str | Text]]:
    left = f", {seconds(now.seconds_left)} left" if now.seconds_left is not None else ""
    yield "step", f"{now.step:,}" + (f" of {now.steps:,}" if now.steps else "") + left
    if now.loss is not None:
        scale, unit = (now.bits_per_nat, "bits/byte") if now.bits_per_nat else (1.0, "nats/token")
        course = sparkline(now.losses, COURSE)
        yield "loss", Text.assemble(f"{now.loss * scale:.3f} {unit}  ", (course, "cyan"))
        if now.heldout_loss is not None:
            yield "held out", f"{now.heldout_loss * scale:.3f} {unit}"
    if now.step_seconds is not None and now.tokens_per_second is not None:
        mfu = f", MFU {now.mfu:.1%}" if now.mfu is not None else ""
        yield "speed", f"{count(now.tokens_per_second)} tokens/s, {_short(now.step_seconds)} a step{mfu}"
    if now.grad_norm is not None and now.lr is not None:
        yield "norm, lr", f"{now.grad_norm:.2f}, {now.lr:.2g}"
    if now.held_bytes:
        kinds = ", ".join(f"{kind} {size(held)}" for kind, held in now.held_bytes.items())
        yield "memory", f"{kinds} ({'measured' if now.measured else 'planned'}, a rank)"
    if now.sent_bytes:
        yield "sent", ", ".join(f"{axis} {size(sent)} a step" for axis, sent in now.sent_bytes.items())
    if now.waited_seconds:
        waits = ", ".join(f"{axis} {_short(waited)} a step" for axis, waited in now.waited_seconds.items())
        yield "waited", f"{waits} (rank 0)"
    if now.skew is not None:
        yield "skew", f"the busiest rank {now.skew:.0%} above the median"
    yield "saved", now.checkpoint or "nothing yet"


def _ranks(now: "Now") -> Table:
    """One line a rank; of many the busiest."""
    ranks = list(range(max(len(now.busy_seconds), len(now.memory_bytes))))
    busy = dict(enumerate(now.busy_seconds))
    if len(ranks) > MOST_RANKS:
        ranks = sorted(sorted(ranks, key=lambda rank: -busy.get(rank, 0.0))[:MOST_RANKS])
    most = max(now.busy_seconds, default=0.0) or 1.0
    table = Table.grid(padding=(0, 2))
    for rank in ranks:
        has = size(now.memory_bytes[rank]) if rank < len(now.memory_bytes) else ""
        own = busy.get(rank)
        bar = "█" * round(own / most * BUSY) if own is not None else ""
        table.add_row(f"rank {rank}", f"busy {_short(own)}" if own is not None else "", Text(bar, "cyan"), has)
    return table


def _short(duration: float) -> str:
    return f"{duration * 1e3:.3g} ms" if duration < 1 else f"{duration:.3g} s"


@contextmanager
def _keys() -> "Iterator[_Quits]":
    """Whether q was typed within some seconds; where the keyboard is not ours, only the time passes."""
    if not sys.stdin.isatty() or sys.platform == "win32":
        yield _Quits(None)
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield _Quits(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class _Quits:
    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def __call__(self, patience: float) -> bool:
        if self._fd is None:
            time.sleep(patience)
            return False
        ready, _, _ = select.select([self._fd], [], [], patience)
        return bool(ready) and sys.stdin.read(1) in ("q", "Q", "")
