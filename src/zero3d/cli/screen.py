"""The screen for people: tables before and after, in between a bar on a terminal or a line now and then."""

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from zero3d.cli import results, tables
from zero3d.cli.style import count, seconds

if TYPE_CHECKING:
    from zero3d.engine import StepReport
    from zero3d.train import Plan, Summary

LINE_SECONDS = 10.0
"""Where there is no terminal, a line at the first step, the last, and this often."""
RECENT = 0.1
"""How much of the shown speed is the newest step's."""


class Screen:
    """Shows a run on `console`; `brief`: its progress alone, as where stdout belongs to a program."""

    def __init__(self, console: Console, *, brief: bool, config_path: str) -> None:
        self._console = console
        self._brief = brief
        self._config_path = config_path
        self._losses: list[float] = []
        self._pace: _Pace | None = None
        self._progress: Progress | None = None
        self._next_line = 0.0

    def started(self, plan: "Plan") -> None:
        if not self._brief:
            for part in (tables.what_will_run(plan), tables.who_holds_what(plan), tables.levels(plan)):
                self._console.print(part, "")
        self._pace = _Pace(plan.config.num_steps, plan.bits_per_nat)
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                _Facts(table_column=Column(no_wrap=True)),
            )
            self._progress = Progress(*columns, console=self._console, expand=True, transient=True)
            self._progress.add_task("starting", total=plan.config.num_steps, facts="")
            self._progress.start()

    def stepped(self, report: "StepReport") -> None:
        assert self._pace is not None
        self._losses.append(report.loss)
        done, facts = report.step, self._pace.facts(report)
        name = f"step {done:,}/{self._pace.steps:,}"
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, description=name, facts=facts)
        elif time.monotonic() >= self._next_line or done == self._pace.steps:
            self._next_line = time.monotonic() + LINE_SECONDS
            self._console.print(f"{name}  {facts}", highlight=False, soft_wrap=True)

    def working_on(self, what: str) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=what, facts="")
        else:
            self._console.print(what, highlight=False)

    def done(self, summary: "Summary") -> None:
        self.close()
        if self._brief:
            return
        self._console.print(results.how_it_went(summary, self._losses), "")
        for part in (
            results.what_was_learned(summary),
            results.what_was_held(summary),
            results.sample(summary),
            results.what_next(self._config_path, summary.plan),
        ):
            self._console.print(part, "")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _Pace:
    """The text behind the bar: loss, speed, gradient norm, learning rate, time left."""

    def __init__(self, steps: int, bits_per_nat: float | None) -> None:
        self.steps = steps
        self._bits_per_nat = bits_per_nat
        self._step_seconds = 0.0

    def facts(self, report: "StepReport") -> str:
        # The first step also fills caches and says little about the others.
        recent = RECENT if report.step > 2 else 1.0
        self._step_seconds += recent * (report.seconds - self._step_seconds)
        left = self._step_seconds * (self.steps - report.step)
        loss = (
            f"{report.loss:.3f} nats"
            if self._bits_per_nat is None
            else f"{report.loss * self._bits_per_nat:.3f} bits/byte"
        )
        parts = [
            loss,
            f"{count(report.tokens / self._step_seconds)} tokens/s",
            f"norm {report.grad_norm:.2f}" if not report.skipped else "skipped",
            f"lr {report.lr:.2g}",
            f"{seconds(left)} left",
        ]
        return " · ".join(parts)


class _Facts(ProgressColumn):
    """What is known of the latest step."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields["facts"]))
