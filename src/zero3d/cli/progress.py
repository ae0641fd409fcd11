"""How far something is that reads or writes many bytes: on stderr, and only once it takes long."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from zero3d.cli.style import seconds, size

PATIENCE = 2.0
"""Seconds before anything is shown."""
LINE_SECONDS = 10.0
"""Where there is no terminal, a line this often."""


class Bytes:
    """Called with (bytes that are done, bytes in all); `what` is under way."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._console = Console(stderr=True)
        self._began = time.monotonic()
        self._next_line = self._began + PATIENCE
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next_line or not done:
            return
        left = (now - self._began) * (total - done) / done
        told = f"{size(done)} of {size(total)}, {seconds(left)} left"
        if not self._console.is_terminal:
            self._next_line = now + LINE_SECONDS
            self._console.print(f"{self._what}: {told}", highlight=False, soft_wrap=True)
            return
        if self._progress is None:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[told]}"),
            )
            self._progress = Progress(*columns, console=self._console, expand=True, transient=True)
            self._progress.add_task(self._what, total=total, told=told)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, told=told)
