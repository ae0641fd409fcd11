"""The screen for people: tables before and after, in between a bar on a terminal or a line now and then."""

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from zero3d.cli import results, tables
from zero3d.cli.offload_tables import host_memory, split_text
from zero3d.cli.options import Options
from zero3d.cli.style import count, seconds
from zero3d.cli.suggest import suggestions
from zero3d.listening import Listening
from zero3d.records import RunFolder

if TYPE_CHECKING:
    from zero3d.reports import StepReport
    from zero3d.stopping import Stopped
    from zero3d.train import Plan, Summary
    from zero3d.watching.notice import Notice

LINE_SECONDS = 10.0
"""Where there is no terminal, a line at the first step, the last, and this often."""
RECENT = 0.1
"""How much of the shown speed is the newest step's."""
SEPARATOR = " · "
BESIDE = 12
"""Columns of the bar's line that are neither the step nor what is known of it."""


class Screen(Listening):
    """Shows a run on `console`; `brief`: its progress alone, as where stdout belongs to a program."""

    def __init__(self, console: Console, *, brief: bool, options: Options, folder: RunFolder) -> None:
        self._console = console
        self._brief = brief
        self._options = options
        self._folder = folder
        self._losses: list[float] = []
        self._pace: _Pace | None = None
        self._progress: Progress | None = None
        self._next_line = 0.0

    def started(self, plan: "Plan") -> None:
        if self._folder.kept:
            self._print(Text(f"earlier records kept as {' and '.join(self._folder.kept)}"))
        if plan.resumed:
            self._print(Text(f"goes on from {plan.resumed}"))
        if not self._brief:
            holdings = tables.who_holds_what(plan.config, plan.predicted)
            there = [host_memory(plan.host_needs)] if plan.host_needs else []
            for part in (tables.what_will_run(plan), holdings, *there, tables.levels(plan)):
                self._console.print(part, "")
        self._pace = _Pace(plan.config.num_steps, *results.loss_unit(plan))
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
        room = self._console.width - len(name) - BESIDE
        while self._progress is not None and len(facts) > 1 and len(SEPARATOR.join(facts)) > room:
            facts.pop(-1 if len(facts) == 2 else -2)  # how long it takes goes last
        told = SEPARATOR.join(facts)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, description=name, facts=told)
        elif time.monotonic() >= self._next_line or done == self._pace.steps:
            self._next_line = time.monotonic() + LINE_SECONDS
            self._console.print(f"{name}  {told}", highlight=False, soft_wrap=True)

    def noticed(self, notice: "Notice") -> None:
        self._print(Text(f"step {notice.step:,}: {notice.message}", "yellow"))

    def stopped(self, stopped: "Stopped") -> None:
        """What is to be said the command says at its very end, or torchrun's rank 0."""
        self.close()

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
        for line in (*results.what_was_saved(summary), *results.what_was_traced(summary)):
            self._print(line)
        for part in (
            results.what_was_learned(summary),
            results.what_was_held(summary),
            results.sample(summary),
        ):
            self._console.print(part, "")
        for line in results.what_next(suggestions(self._options, summary.plan)):
            self._print(line)

    def _print(self, line: Text) -> None:
        """A line that is never broken by us."""
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _Pace:
    """The text behind the bar: loss, speed, gradient norm, learning rate, time left."""

    def __init__(self, steps: int, scale: float, unit: str) -> None:
        self.steps = steps
        self._scale, self._unit = scale, unit
        self._step_seconds = 0.0

    def facts(self, report: "StepReport") -> list[str]:
        # The first step also fills caches and says little about the others.
        recent = RECENT if report.step > 2 else 1.0
        self._step_seconds += recent * (report.seconds - self._step_seconds)
        left = self._step_seconds * (self.steps - report.step)
        return [
            f"{report.loss * self._scale:.3f} {self._unit}",
            f"{count(report.tokens / self._step_seconds)} tokens/s",
            *([f"MFU {report.mfu:.1%}"] if report.mfu is not None else []),
            f"norm {report.grad_norm:.2f}" if not report.skipped else "skipped",
            f"lr {report.lr:.2g}",
            *([split_text(report.split)] if report.split else []),
            f"{seconds(left)} left",
        ]


class _Facts(ProgressColumn):
    """What is known of the latest step."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields["facts"]))
