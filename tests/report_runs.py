"""Folders as runs leave them, made by hand: what the tests of `zero3d report` read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero3d.config import Config
from zero3d.layout import Layout
from zero3d.pipeline.action import Action
from zero3d.pipeline.schedules.registry import SCHEDULES
from zero3d.pipeline.simulate import simulate
from zero3d.records import CONFIG, METRICS, PLAN, TRACE
from zero3d.report.plan_file import PlanFile, States
from zero3d.trace.chrome import chrome
from zero3d.trace.span import Span, Trace

LAYOUT = Layout(dp=2, pp=2)
HELD = {"weights": [80, 80, 72, 72], "gradients": [80, 80, 72, 72], "optimizer": [160, 160, 144, 144]}


def step_line(number: int, **changes: Any) -> dict[str, Any]:
    """A step of 1,000 tokens in half a second, whose loss falls from 5."""
    return {
        "event": "step",
        "step": number,
        "loss": 5.0 - 0.1 * number,
        "tokens": 1000,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "skipped": False,
        "seconds": 0.5,
        **changes,
    }


def done_line(**changes: Any) -> dict[str, Any]:
    return {
        "event": "done",
        "steps": 10,
        "train_loss": 4.5,
        "heldout_loss": 4.75,
        "tokens_per_second": 2000.0,
        "held_bytes": {**HELD, "activations": [512, 512, 256, 256]},
        "sent_bytes": {"dp": [40, 40, 36, 36], "pp": [64, 64, 64, 64]},
        "checkpoint": None,
        "trace": None,
        **changes,
    }


def config(**run: Any) -> Config:
    tree = {
        "run": {"name": "made by hand", "steps": 10, **run},
        "data": {"global_batch": 8},
        "parallel": {"dp": 2, "pp": 2, "micro_batch": 1},
        "zero": {"level": 1},
    }
    return Config.load(tree).resolved(4, native_bf16=False)


def plan(**changes: Any) -> PlanFile:
    """Level 1 over dp 2: half of the optimizer state is a rank's."""
    sizes = [{"weights": 80, "gradients": 80}, {"weights": 72, "gradients": 72}]
    states = [
        [States(**one, optimizer=4 * one["weights"] // (2 if level else 1)) for level in range(4)] for one in sizes
    ]
    facts: dict[str, Any] = {
        "world": 4,
        "device": "cpu",
        "dp": 2,
        "tp": 1,
        "pp": 2,
        "level": 1,
        "group": 2,
        "parameters": 38,
        "trainable": 38,
        "dtypes": [("weights", "float32")],
        "stages": [[(0, 2)], [(3, 5)]],
        "states": states,
        "held_bytes": HELD,
        "steps": 10,
        "train_tokens": 100_000,
        "documents": 3,
        "vocabulary": 256,
        "bits_per_nat": 1.4427,
        "first_step": 0,
        "resumed": "",
    }
    return PlanFile(**{**facts, **changes})


def trace(steps: tuple[int, ...] = (3, 4)) -> Trace:
    """1F1B of 2 stages and 4 micro-batches on dp 2: a forward takes 1 ms, a backward 2. A step ends with an update of 2
    ms, whose first half is a wait for dp, and 1 ms of nothing."""
    actions = SCHEDULES["1f1b"].actions(2, 2, 4)
    timeline = simulate(actions)
    ranks: list[list[Span]] = []
    for rank in range(LAYOUT.world):
        spans: list[Span] = []
        for index, step in enumerate(steps):
            zero, ends = index * 1.0, timeline.makespan * 1e-3
            for run in timeline.ranks[LAYOUT.place(rank).pp]:
                start, end = zero + run.start * 1e-3, zero + run.end * 1e-3
                spans.append(_span(run.action.full, "action", step, start, end, facts=_facts(run.action)))
            begins = zero + ends
            about = {"label": "sums", "bytes": 64}
            for sort, what in (("wait", "wait for all_reduce"), ("call", "all_reduce")):
                spans.append(_span(what, sort, step, begins, begins + 1e-3, axis="dp", facts=about))
            spans.append(_span("update", "part", step, begins, begins + 2e-3))
            spans.append(_span(f"step {step}", "step", step, zero, begins + 3e-3))
        ranks.append(spans)
    return Trace(layout=LAYOUT, ranks=ranks)


def _facts(action: Action) -> dict[str, str | int]:
    return {"kind": action.kind.value, "stage": action.stage, "micro_batch": action.micro_batch}


def _span(what: str, sort: Any, step: int, start: float, end: float, **more: Any) -> Span:
    return Span(what=what, sort=sort, step=step, start=start, end=end, **more)


def lines(*events: Mapping[str, Any]) -> str:
    return "".join(json.dumps(one) + "\n" for one in events)


def fill(folder: Path, *, made: Config | None = None, done: bool = True, traced: bool = True) -> Path:
    """A run of 10 steps in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text((made or config()).to_toml(), encoding="utf-8")
    (folder / PLAN).write_text(plan().model_dump_json(), encoding="utf-8")
    steps = [step_line(number) for number in range(1, 11)]
    (folder / METRICS).write_text(lines(*steps, *([done_line()] if done else [])), encoding="utf-8")
    if traced:
        (folder / TRACE).write_text(chrome(trace()), encoding="utf-8")
    return folder
