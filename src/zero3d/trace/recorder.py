"""Keeps what a rank does, and when.

Times are the host's. On a GPU the host runs ahead of the device: it waits for its stream wherever an action, an update,
a wait or a job begins and ends, so that these are the device's times, and the traced steps are slower than others.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from zero3d.comm.done import DONE
from zero3d.contracts import Pending, Watched
from zero3d.trace.span import Sort, Span

if TYPE_CHECKING:
    from zero3d.pipeline.action import Action

Facts = dict[str, str | int]
SEND = "send"
"""Is waited for at the very end of the step, when it is long over: its span is that of its issue alone."""


class Recorder:
    """A `Watcher` that keeps what it is told within `step`, as spans by this process' clock. Jobs are kept as they end,
    each on its queue's thread, some after their step."""

    def __init__(self, device: torch.device) -> None:
        self.spans: list[Span] = []  # Threads may append at a time: that is one operation.
        self._device = device
        self._step = 0

    @contextmanager
    def step(self, number: int) -> Iterator["Recorder"]:
        """What goes on here is of step `number`, counted from 1."""
        self._step = number
        try:
            with self._timed("step", f"step {number}", {}):
                yield self
        finally:
            self._step = 0

    @contextmanager
    def acting(self, action: "Action") -> Iterator[None]:
        facts: Facts = {"kind": action.kind.value, "stage": action.stage, "micro_batch": action.micro_batch}
        with self._timed("action", action.full, facts):
            yield

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        with self._timed("part", what, {}):
            yield

    def calling(self, axis: str, verb: str, label: str, nbytes: int) -> Watched:
        facts: Facts = {"label": label, "bytes": nbytes}
        step, issued = self._step, perf_counter()

        def watched(pending: Pending) -> Pending:
            # What is done at once, as on an axis of one rank, has moved nothing.
            if not step or pending is DONE:
                return pending
            if verb == SEND:
                self._add("call", verb, step, issued, perf_counter(), axis, facts)
            return _UnderWay(self, pending, (axis, verb, step, issued), facts)

        return watched

    def queueing(self, queue: str, what: str) -> AbstractContextManager[None]:
        return self._job(queue, what, self._step) if self._step else nullcontext()

    def waited(self, call: tuple[str, str, int, float], facts: Facts, began: float) -> None:
        """A wait has ended that began then. call: (axis, verb, step, when it was issued)"""
        axis, verb, step, issued = call
        ended = self.now()
        if verb != SEND:
            self._add("call", verb, step, issued, ended, axis, facts)
        if self._step:
            self._add("wait", f"wait for {verb}", self._step, began, ended, axis, facts)

    def now(self) -> float:
        """When all is done that this thread's stream was given."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return perf_counter()

    @contextmanager
    def _timed(self, sort: Sort, what: str, facts: Facts) -> Iterator[None]:
        began = self.now()
        yield
        if self._step:
            self._add(sort, what, self._step, began, self.now(), "", facts)

    @contextmanager
    def _job(self, queue: str, what: str, step: int) -> Iterator[None]:
        began = self.now()
        yield
        self.spans.append(Span(what=what, sort="job", step=step, start=began, end=self.now(), queue=queue))

    def _add(self, sort: Sort, what: str, step: int, start: float, end: float, axis: str, facts: Facts) -> None:
        self.spans.append(Span(what=what, sort=sort, step=step, start=start, end=end, axis=axis, facts=facts))


class _UnderWay:
    """A call under way that tells when it has been waited for."""

    def __init__(self, recorder: Recorder, pending: Pending, call: tuple[str, str, int, float], facts: Facts) -> None:
        self._recorder = recorder
        self._pending = pending
        self._call = call
        self._facts = facts
        self._told = False

    def wait(self) -> None:
        began = self._recorder.now()
        self._pending.wait()
        if not self._told:
            self._told = True
            self._recorder.waited(self._call, self._facts, began)
