"""When offload's queues work: beside the computing, or after it. Told by what a `Recorder` kept, in order of events.

That something may overlap is made certain rather than hoped for: a job, or a layer, is held up until what is to come
before its end has happened. Where the one waits for the other this never comes, and the test says what did not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch

import zero3d
from tests import tiny
from tests.world import run_ranks
from zero3d.contracts import Watched
from zero3d.pipeline.action import Action
from zero3d.trace.recorder import Recorder
from zero3d.trace.span import QUEUES, Span

pytestmark = [pytest.mark.alone, pytest.mark.ranks]

LEVELS = (1, 2, 3)
PATIENCE = 30
"""Seconds after which what is waited for will never come. Below the ranks' own time-out, which says less."""
STEPS = 4

Point = tuple[str, str, int]
"""(queue or module, bucket or what it did, step)."""


@dataclass
class Held:
    """A `Watcher`: the recorder's, which also holds jobs up.

    until: what the job, or the module's backward, waits for; delay: seconds that every job takes longer
    """

    until: Mapping[Point, Point] = field(default_factory=dict)
    delay: float = 0.0
    step: int = 0
    recorder: Recorder = field(default_factory=lambda: Recorder(torch.device("cpu")))
    points: dict[Point, Event] = field(default_factory=dict)

    def acting(self, action: Action) -> AbstractContextManager[None]:
        return self.recorder.acting(action)

    def doing(self, what: str) -> AbstractContextManager[None]:
        return self.recorder.doing(what)

    def calling(self, axis: str, verb: str, label: str, nbytes: int) -> Watched:
        return self.recorder.calling(axis, verb, label, nbytes)

    def queueing(self, queue: str, what: str) -> AbstractContextManager[None]:
        return self._job((queue, what, self.step), self.recorder.queueing(queue, what))

    @contextmanager
    def _job(self, point: Point, recorded: AbstractContextManager[None]) -> Iterator[None]:
        with recorded:
            sleep(self.delay)
            self.reach(point)
            yield
        self.pass_by((point[0], f"{point[1]} is over", point[2]))

    def reach(self, point: Point) -> None:
        """Waits there for what it is held up for."""
        wanted = self.until.get(point)
        if wanted is not None and not self._event(wanted).wait(PATIENCE):
            raise AssertionError(f"{point} waits in vain for {wanted}")

    def pass_by(self, point: Point) -> None:
        self._event(point).set()

    def _event(self, point: Point) -> Event:
        return self.points.setdefault(point, Event())

    def watch(self, model: Any) -> None:
        """Points of the first block, whose backward is the last: each as a span too."""

        def at(what: str) -> Callable[..., None]:
            def happened(*_: Any) -> None:
                with self.recorder.doing(what):
                    self.reach(("blocks.0", what, self.step))
                    self.pass_by(("blocks.0", what, self.step))

            return happened

        model.blocks[0].register_forward_pre_hook(at("forward begins"))
        model.blocks[0].register_full_backward_pre_hook(at("backward begins"))
        model.blocks[0].register_full_backward_hook(at("backward is over"))


def spans_of(config: dict[str, Any], held: Held, holds: Callable[[list[Span]], Mapping[Point, Point]]) -> list[Span]:
    """This rank's spans of 4 steps, of which the third is held up as `holds` says, who knows the second one's spans."""
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, config)
    held.watch(engine.model)
    for step, batch in enumerate(tiny.batches(STEPS, 4), start=1):
        held.step = step
        with held.recorder.step(step):
            engine.step(tiny.part(batch, engine.dp_index, engine.dp_size), held)
        if step == 2:
            held.until = holds(of(engine.trace(held.recorder.spans).ranks[engine.rank], "job", step))
    spans = engine.trace(held.recorder.spans).ranks[engine.rank]
    engine.close()
    return list(spans)


def of(spans: Sequence[Span], what: str, step: int) -> list[Span]:
    """Spans of a sort, or jobs of a queue, in one step, by start."""
    return sorted((span for span in spans if what in (span.sort, span.queue) and span.step == step), key=begin)


def begin(span: Span) -> float:
    return span.start


def one(spans: Sequence[Span], what: str, step: int) -> Span:
    (found,) = (span for span in of(spans, "part", step) if span.what == what)
    return found


def options(level: int, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"zero": {"level": level, "prefetch": 1}, "offload": {"optimizer": "host"}}
    return {key: {**config.get(key, {}), **more.get(key, {})} for key in (*config, *more)}


def beside(jobs: list[Span]) -> Mapping[Point, Point]:
    """The last layer's backward waits for the first bucket on the host, the last update for the first new weights on
    the device, the last new weights for the next step's first layer."""
    down, update, up = (of(jobs, queue, 2) for queue in QUEUES)
    return {
        ("blocks.0", "backward begins", 3): ("down", f"{down[0].what} is over", 3),
        ("update", update[-1].what, 3): ("up", f"{up[0].what} is over", 3),
        ("up", up[-1].what, 3): ("blocks.0", "forward begins", 4),
    }


def with_overlap() -> list[list[Span]]:
    return [spans_of(options(level), Held(), beside) for level in LEVELS]


@pytest.mark.parametrize("ranks", [1, 2])
def test_queues_work_beside_the_computing_and_each_other(ranks: int) -> None:
    for by_level in run_ranks(ranks, with_overlap, timeout=240):
        for spans in by_level:
            down, update, up = (of(spans, queue, 3) for queue in QUEUES)
            buckets = {span.what for span in update}
            assert len(buckets) == len(down) == len(update) == len(up) >= 5, "each bucket once on each way"
            assert {span.what for span in down} == {span.what for span in up} == buckets
            assert down[0].end < one(spans, "backward begins", 3).end < one(spans, "backward is over", 3).start
            assert up[0].end < update[-1].end
            assert one(spans, "forward begins", 4).start < up[-1].end


def without_overlap() -> list[list[Span]]:
    """Jobs take their time, so that who does not wait for them is seen."""
    config = {"overlap": False}
    return [spans_of(options(level, zero=config), Held(delay=0.005), lambda jobs: {}) for level in LEVELS]


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_overlap_one_thing_comes_after_the_other(ranks: int) -> None:
    for by_level in run_ranks(ranks, without_overlap, timeout=240):
        for spans in by_level:
            jobs, calls = of(spans, "job", 3), of(spans, "call", 3)
            assert len(jobs) >= 15 and len(calls) >= 5 * (ranks - 1)
            for before, after in pairwise(sorted([*jobs, *calls], key=begin)):
                assert before.end <= after.start
            assert one(spans, "backward is over", 3).end <= jobs[0].start
            assert jobs[-1].end <= one(spans, "forward begins", 4).start
            updates, ups = of(spans, "update", 3), of(spans, "up", 3)
            assert max(span.end for span in of(spans, "down", 3)) <= updates[0].start <= ups[0].start


def late(jobs: list[Span]) -> Mapping[Point, Point]:
    """The first update waits until the next step's backward is over, and with it all updates behind it."""
    return {("update", of(jobs, "update", 2)[0].what, 3): ("blocks.0", "backward is over", 4)}


def delayed() -> list[list[Span]]:
    config = {"optimizer": "host", "delayed_update": 1}
    return [spans_of(options(level, offload=config), Held(), late) for level in LEVELS]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_delayed_update_goes_on_through_the_next_step(ranks: int) -> None:
    for by_level in run_ranks(ranks, delayed, timeout=240):
        for spans in by_level:
            over = one(spans, "backward is over", 4)
            for update in of(spans, "update", 3):
                assert update.end > over.start > one(spans, "forward begins", 4).end
            made, brought = of(spans, "update", 3), of(spans, "up", 4)
            assert len(made) == len(brought) >= 5
            assert made[0].end <= brought[0].end, "what it made comes up a step later"
