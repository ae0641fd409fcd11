"""Traced steps: the same numbers, every action of the schedule once, and files that other programs read."""

import json
import xml.etree.ElementTree
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

import zero3d
from tests import tiny
from tests.command import fill
from tests.command import zero3d as command
from tests.world import run_ranks
from zero3d.comm.done import DONE
from zero3d.pipeline.action import Action, Kind
from zero3d.records import keep_earlier
from zero3d.trace import collect
from zero3d.trace.chrome import chrome
from zero3d.trace.picture import svg
from zero3d.trace.recorder import Recorder
from zero3d.trace.span import QUEUES, Span, Trace
from zero3d.trace.timelines import measured, middle_step, planned
from zero3d.unwatched import UNWATCHED

pytestmark = pytest.mark.ranks

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"parallel": {"micro_batch": 2}}),
    "dp, level 1": (2, {"zero": {"level": 1}, "parallel": {"micro_batch": 2}}),
    "dp in groups, level 3": (4, {"zero": {"level": 3, "replicas": 2}}),
    "pp": (2, {"parallel": {"pp": 2, "micro_batch": 1}}),
    "pp, split backward, two stages a rank": (
        2,
        {"parallel": {"pp": 2, "micro_batch": 1, "schedule": "zbv", "stages_per_rank": 2}},
    ),
    "pp x tp": (4, {"parallel": {"pp": 2, "tp": 2, "micro_batch": 2, "plan": PLAN}}),
    "pp x dp, level 3": (4, {"zero": {"level": 3}, "parallel": {"pp": 2, "micro_batch": 1}}),
    "dp, offload": (2, {"zero": {"level": 2}, "parallel": {"micro_batch": 2}, "offload": {"optimizer": "host"}}),
    "pp, offload": (2, {"parallel": {"pp": 2, "micro_batch": 1}, "offload": {"optimizer": "host"}}),
    "level 3, late offload": (1, {"zero": {"level": 3}, "offload": {"optimizer": "host", "delayed_update": 1}}),
    "level 3, offload with weights": (
        2,
        {"zero": {"level": 3}, "offload": {"optimizer": "host", "parameters": "host"}},
    ),
}
TRACED = (2, 3)
STEPS = 4


def traced(config: dict[str, Any]) -> tuple[Trace, list[Action], dict[int, Counter[str]], list[float], list[float]]:
    """The trace, this rank's actions of a step, calls of each traced step by axis, and losses with and without it."""

    def run(recorder: Recorder | None) -> Any:
        engine = zero3d.Engine(tiny.tiny(tied=False), tiny.loss, tiny.adamw, config)
        made: dict[int, Counter[str]] = {}
        losses = []
        for step, batch in enumerate(tiny.batches(STEPS, 8), start=1):
            mine = tiny.part(batch, engine.dp_index, engine.dp_size)
            if recorder is None or step not in TRACED:
                losses.append(engine.step(mine).loss)
                continue
            with recorder.step(step) as watcher:
                losses.append(engine.step(mine, watcher).loss)
            axes = engine._parts.axes
            made[step] = Counter({axis.name: len(axis.calls) for axis in axes if axis.size > 1})
        micro_batches = 8 // engine.dp_size // (engine.config.parallel.micro_batch or 8 // engine.dp_size)
        return engine, list(engine._parts.actions(micro_batches)), made, losses

    recorder = Recorder(torch.device("cpu"))
    engine, actions, made, losses = run(recorder)
    trace = engine.trace(recorder.spans)
    engine.close()
    return trace, actions, made, losses, run(None)[3]


@pytest.mark.parametrize("name", LAYOUTS)
def test_traced_steps(name: str) -> None:
    ranks, config = LAYOUTS[name]
    results = run_ranks(ranks, traced, config)
    trace: Trace = results[0][0]
    assert all(other == trace for other, *_ in results), "every rank has the whole trace"
    assert trace.steps == list(TRACED) and trace.layout.world == ranks
    for rank, (_, actions, made, losses, unwatched) in enumerate(results):
        assert losses == unwatched, "watching changes no bit"
        for step in TRACED:
            assert [span.action for span in trace.of(rank, "action", step)] == actions
            assert [span.what for span in trace.of(rank, "part", step)] == ["update"]
            calls = Counter(span.axis for span in trace.of(rank, "call", step))
            assert calls >= made[step], "and those before the first action, which agree on micro-batches"
            assert calls.keys() == made[step].keys()
        follow_each_other([span for span in trace.ranks[rank] if span.sort in ("action", "part")])
        lie_within(list(trace.of(rank, "wait")), list(trace.of(rank, "step")))
        assert all(span.facts["label"] and int(span.facts["bytes"]) > 0 for span in trace.of(rank, "call"))
        check_jobs(trace, rank, config.get("offload", {}))
    crosses_once(trace)
    check_chrome(trace, json.loads(chrome(trace)))
    check_picture(trace, svg(trace, f"{name} <&>"))


def follow_each_other(spans: list[Span]) -> None:
    for one, then in pairwise(spans):
        assert one.start <= one.end <= then.start


def lie_within(spans: list[Span], others: list[Span]) -> None:
    for span in spans:
        assert any(other.start <= span.start <= span.end <= other.end for other in others)


def check_jobs(trace: Trace, rank: int, offload: dict[str, Any]) -> None:
    """A queue does one job after the other; in each step every bucket is updated once and brought up once, and has its
    gradients brought down at least once."""
    jobs = {queue: [span for span in trace.of(rank, "job") if span.queue == queue] for queue in QUEUES}
    assert sum(map(len, jobs.values())) == len(list(trace.of(rank, "job")))
    for spans in jobs.values():
        follow_each_other(spans)
    for step in TRACED:
        down, update, up = (Counter(span.what for span in jobs[queue] if span.step == step) for queue in QUEUES)
        assert bool(offload) == bool(update) and down.keys() == update.keys() and set(update.values()) <= {1}
        if offload.get("parameters") == "host":
            assert up.keys() == {f"weights of {label}" for label in update}
        elif offload.get("delayed_update") and step == 2:
            assert not up, "the first one was brought up in time, this one is a step later"
        else:
            assert up == update


def crosses_once(trace: Trace) -> None:
    """What an action needs of another rank's stage is received once, over pp."""
    for rank in range(trace.layout.world):
        for step in TRACED:
            received = [str(span.facts["label"]) for span in trace.of(rank, "call", step) if span.what == "recv"]
            labels = [label for label in received if not label.endswith("tied")]
            stages = {span.action.stage for span in trace.of(rank, "action", step)}
            last = max(span.action.stage for one in range(trace.layout.world) for span in trace.of(one, "action"))
            needed = [
                f"{kind}{action.micro_batch} of stage {other}, 0"
                for action in (span.action for span in trace.of(rank, "action", step))
                for kind, other in [("F", action.stage - 1) if action.kind is Kind.FORWARD else ("B", action.stage + 1)]
                if action.kind is not Kind.WEIGHT and 0 <= other <= last and other not in stages
            ]
            assert sorted(labels) == sorted(needed)


def check_chrome(trace: Trace, found: dict[str, Any]) -> None:
    """The Trace Event Format: what must be there for each kind of event, slices that nest, arrows with two ends."""
    events = found["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes) == list(range(trace.layout.world)) and processes[0].startswith("rank 0 (dp 0")
    threads = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[int, list[str]] = defaultdict(list)
    names: Counter[tuple[str, int]] = Counter()
    for event in events:
        assert event["ph"] in "MXsf" and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            continue
        place = event["pid"], event["tid"]
        assert event["ts"] >= 0 and threads[place].split(" ")[0] in ("actions", *QUEUES, "dp", "tp", "pp")
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["name"] and event["args"]["step"] in TRACED
            slices[place].append((event["ts"], event["ts"] + event["dur"]))
            names[event["cat"], event["pid"]] += 1
        else:
            arrows[event["id"]].append(event["ph"])
            start, end = slices[place][-1]
            assert start <= event["ts"] <= end
    for rank in range(trace.layout.world):
        for sort in ("step", "action", "part", "wait", "call", "job"):
            assert names[sort, rank] == len(list(trace.of(rank, sort)))  # type: ignore[arg-type]
    for place, spans in slices.items():
        around: list[float] = []
        for start, end in spans:
            while around and around[-1] <= start + 0.0005:
                around.pop()
            assert not around or (threads[place] == "actions" and end <= around[-1] + 0.0005), "in nanoseconds"
            around.append(end)
    assert all(sorted(ends) == ["f", "s"] for ends in arrows.values())
    crossed = (str(span.facts["label"]) for spans in trace.ranks for span in spans if span.what == "recv")
    assert len(arrows) == sum(not label.endswith("tied") for label in crossed), "those go both ways under one name"


def check_picture(trace: Trace, text: str) -> None:
    """Planned and measured have the same actions, each once; queues the jobs of the measured step, each once."""
    space = "{http://www.w3.org/2000/svg}"
    root = xml.etree.ElementTree.fromstring(text)
    titles = Counter((one.text or "").split(":")[0] for one in root.iter(f"{space}title"))
    chain = [rank for rank in range(trace.layout.world) if trace.layout.place(rank)[:2] == (0, 0)]
    actions = [span.what for rank in chain for span in trace.of(rank, "action", TRACED[0])]
    others = ("update", *(f"{queue} of " for queue in QUEUES))
    drawn = {title: number for title, number in titles.items() if not title.startswith(others)}
    assert drawn == dict.fromkeys(actions, 2)
    jobs = Counter(f"{one.queue} of {one.what}" for rank in chain for one in trace.of(rank, "job", middle_step(trace)))
    assert {title: number for title, number in titles.items() if title in jobs} == jobs
    plan = planned(trace)
    for step in TRACED:
        found = measured(trace, step)
        assert [[run.action for run in runs] for runs in found.ranks] == [
            [run.action for run in runs] for runs in plan.ranks
        ]
        assert found.makespan >= found.ideal > 0


def test_a_plan_costs_what_was_measured_without_waits_for_other_stages() -> None:
    """Two stages, of which the second takes twice as long; the first waits for 3 s of the 4 s of its backward."""

    def action(text: str, stage: int, start: float, end: float) -> Span:
        facts: dict[str, str | int] = {"kind": text[0], "stage": stage, "micro_batch": int(text[1])}
        return Span(what=text, sort="action", step=3, start=start, end=end, facts=facts)

    wait = Span(what="wait for recv", sort="wait", step=3, start=1, end=5, axis="pp")
    waits = [wait, Span(what="wait for all_gather", sort="wait", step=3, start=5.5, end=5.75, axis="dp")]
    ranks = [
        [action("F0", 0, 0, 1), *waits, action("B0", 0, 1, 6)],
        [action("F0", 1, 1, 3), action("B0", 1, 3, 5)],
    ]
    trace = Trace(layout=zero3d.layout.Layout(pp=2), ranks=ranks)
    for timeline in (planned(trace), measured(trace, 3)):
        assert [[(str(run.action), run.start, run.end) for run in runs] for runs in timeline.ranks] == [
            [("F0", 0, 1000), ("B0", 5000, 6000)],
            [("F0", 1000, 3000), ("B0", 3000, 5000)],
        ]


def far_ahead() -> Trace:
    """Rank 1's clock shows 1000 s more than rank 0's. Both do something at about the same time."""
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, {})
    collect.perf_counter = lambda: perf_counter() + 1000 * engine.rank  # type: ignore[attr-defined]
    now = perf_counter() + 1000 * engine.rank
    return engine.trace([Span(what="a", sort="part", step=1, start=now, end=now + 1)])


def test_ranks_have_one_clock() -> None:
    trace, same = run_ranks(2, far_ahead)
    assert trace == same
    starts = [spans[0].start for spans in trace.ranks]
    assert min(starts) == 0 and max(starts) < 100


def unwatched_steps() -> int:
    """A recorder that is handed in outside of its steps, and one that was handed in before."""
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, {})
    recorder = Recorder(torch.device("cpu"))
    first, second = (tiny.part(batch, engine.dp_index, engine.dp_size) for batch in tiny.batches(2, 4))
    engine.step(first, recorder)
    with recorder.step(2):
        engine.step(second)
    return sum(span.sort != "step" for span in recorder.spans)


def test_off_means_no_records() -> None:
    assert run_ranks(2, unwatched_steps) == [0, 0]
    assert UNWATCHED.calling("dp", "all_reduce", "sums", 4)(DONE) is DONE
    assert UNWATCHED.acting(Action(Kind.FORWARD, 0, 0)) is UNWATCHED.doing("update")


@pytest.mark.cli
def test_the_command_writes_a_trace_and_a_picture(tmp_path: Path) -> None:
    """With 4 steps and 3 to be traced the first step alone is left out."""
    sets = ("--set", "parallel.dp=1", "--set", "parallel.pp=2", "--set", "parallel.micro_batch=1")
    sets += ("--set", "offload.optimizer=host")
    done = command(fill(tmp_path), "train", "tiny.toml", "--json", "--trace", *sets)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["trace"] == "out/trace.json"
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    steps = Counter(event["args"]["step"] for event in events if event.get("cat") == "action")
    assert steps == {2: 16, 3: 16, 4: 16}, "4 micro-batches, forward and backward, on 2 ranks"
    assert {event["args"]["step"] for event in events if event.get("cat") == "job"} == {2, 3, 4}, "the last one's too"
    assert "measured, step" in (tmp_path / "out" / "timeline.svg").read_text()
    assert set(keep_earlier(tmp_path / "out")) >= {"trace-1.json", "timeline-1.svg"}, "for the next run"
