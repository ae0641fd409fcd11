"""Traces a few steps of a run, and leaves them in its folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zero3d.contracts import Watcher
from zero3d.records import TIMELINE, TRACE
from zero3d.trace.chrome import chrome
from zero3d.trace.picture import svg
from zero3d.trace.recorder import Recorder
from zero3d.unwatched import UNWATCHED

if TYPE_CHECKING:
    from zero3d.engine import Engine

FIRST = 2
"""Steps before the first traced one: they fill caches, and agree on what crosses stages."""


class Tracer:
    """Watches `num_traced` of the `steps`, and writes trace.json and timeline.svg into `folder`.

    They are written after one step more, as the last traced one may have left calls under way for it to wait for.
    """

    def __init__(self, engine: "Engine", folder: Path, num_traced: int, steps: range) -> None:
        self.written: Path | None = None
        first = steps.start + max(min(FIRST, len(steps) - num_traced), 0)
        self._engine = engine
        self._folder = folder
        self._traced = range(first, min(first + num_traced, steps.stop))
        self._written_after = min(self._traced.stop, steps.stop - 1)
        self._recorder = Recorder(engine.device)

    @contextmanager
    def step(self, index: int) -> Iterator[Watcher]:
        """Round step `index`, from 0; gives who is to watch it. Collective."""
        if index in self._traced:
            with self._recorder.step(index + 1) as watcher:
                yield watcher
        else:
            yield UNWATCHED
        if self._traced and index == self._written_after:
            self._write()

    def _write(self) -> None:
        engine = self._engine
        trace = engine.trace(self._recorder.spans)
        if engine.rank == 0:
            parallel = engine.config.parallel
            sizes = f"dp {parallel.dp} x tp {parallel.tp} x pp {parallel.pp}"
            title = f"{engine.config.run.name}: schedule {parallel.schedule}, {sizes}"
            (self._folder / TRACE).write_text(chrome(trace), encoding="utf-8")
            (self._folder / TIMELINE).write_text(svg(trace, title), encoding="utf-8")
        self.written = self._folder / TRACE
