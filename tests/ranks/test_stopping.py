"""Runs that are asked to end: all ranks end after the same step, with a checkpoint from which `--resume` goes on as if
nothing had been.

Ranks are forked. One rank alone gets a signal, at a certain or a drawn moment, and nobody else tells the others. Losses
and gradient norms are those of `metrics.jsonl`, and are the same in every bit as those of a run that nobody disturbed.
"""

import json
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch.distributed as dist

from tests.command import fill
from tests.world import run_ranks
from zero3d import train
from zero3d.checkpoint import folders, mine
from zero3d.cli.options import Options
from zero3d.cli.signals import Signals, exit_code
from zero3d.cli.train import read_on_rank
from zero3d.engine import Engine
from zero3d.records import RunFolder
from zero3d.stopping import Stopped

STEPS = 6
Moment = Callable[[], None]
"""Called on the rank that is asked, before it trains: makes a signal come to it at some moment."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


def on_rank(
    folder: Path, world: int, settings: tuple[str, ...], resume: bool, moments: dict[int, Moment]
) -> tuple[int, str, int]:
    """What one rank of the command does. -> last step, by which signal it ended, exit code."""
    os.chdir(folder)
    options = Options(
        config=Path("tiny.toml"), settings=settings, ranks=None, json=False, debug=False, allow_code=False
    )
    config, prepared, build = read_on_rank(options, world)
    listeners = [RunFolder(Path(config.run.out))]
    ended = train.train(config, prepared, build, listeners, resume=resume, asked=Asking(moments))
    if isinstance(ended, Stopped):
        return ended.step, ended.signal, exit_code(ended.signal, saved=ended.checkpoint is not None)
    return ended.steps, "", 0


class Asking(Signals):
    """Of a rank of a process group; arranges for its moment once it listens."""

    def __init__(self, moments: dict[int, Moment]) -> None:
        super().__init__(alone=False)
        self._moments = moments

    def listening(self) -> Any:
        moment = self._moments.get(dist.get_rank() if dist.is_initialized() else 0)
        if moment is not None:
            moment()
        return super().listening()


def run(
    folder: Path, *settings: str, world: int = 2, resume: bool = False, moments: dict[int, Moment] | None = None
) -> list[tuple[int, str, int]]:
    words = ("run.steps=1000000", f"run.stop_after={STEPS}", "zero.level=3", *settings)
    if not any(one.startswith("parallel.dp") for one in settings):
        words = (*words, f"parallel.dp={world}")
    return run_ranks(world, on_rank, folder, world, words, resume, moments or {})


def events(folder: Path, out: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path, out: str = "out") -> list[tuple[int, float, float]]:
    return [(one["step"], one["loss"], one["grad_norm"]) for one in events(folder, out) if one["event"] == "step"]


def send(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


def in_call(owner: Any, attribute: str, number: int, name: str) -> None:
    """Just before the so manieth call of it."""
    call, calls = getattr(owner, attribute), 0

    def and_send(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            send(name)
        return call(*arguments, **options)

    setattr(owner, attribute, and_send)


def after(seconds: float, name: str) -> None:
    threading.Timer(seconds, send, [name]).start()


def is_the_undisturbed_run(folder: Path) -> None:
    assert steps(folder) == steps(folder, "straight") and len(steps(folder)) == STEPS
    done = [
        [one["heldout_loss"] for one in events(folder, out) if one["event"] == "done"] for out in ("out", "straight")
    ]
    assert done[0] == done[1] and len(done[0]) == 1


MOMENTS: dict[str, tuple[Moment, str, list[str]]] = {
    "in the first step": (partial(in_call, Engine, "step", 1, "SIGTERM"), "SIGTERM", []),
    "in a step, without checkpoints": (
        partial(in_call, Engine, "step", 3, "SIGUSR1"),
        "SIGUSR1",
        ["checkpoint.every=0"],
    ),
    "while a file is written in the background": (
        partial(in_call, mine, "write", 1, "SIGUSR1"),
        "SIGUSR1",
        ["checkpoint.every=2"],
    ),
    "as the step that saves ends": (partial(in_call, Engine, "save", 1, "SIGINT"), "SIGINT", ["checkpoint.every=2"]),
}


def test_one_rank_that_is_asked_ends_all_after_the_same_step_and_it_goes_on_from_there(folder: Path) -> None:
    assert run(folder, "run.out=straight", "checkpoint.every=0") == [(STEPS, "", 0)] * 2
    for moment, (begin, name, settings) in MOMENTS.items():
        ended = run(folder, *settings, moments={1: begin})
        assert len(set(ended)) == 1, (moment, ended)
        step, by, code = ended[0]
        assert by == name and 1 <= step < STEPS, (moment, ended)
        assert code == {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 0}[name]
        last = events(folder)[-1]
        saved = f"out/checkpoints/step-{step:08}"
        assert (last["event"], last["step"], last["signal"], last["checkpoint"]) == ("stopped", step, name, saved), (
            moment
        )
        assert saved in last["message"] and "--resume" in last["message"]
        assert folders.newest(folder / "out/checkpoints").path.name == f"step-{step:08}"
        assert run(folder, *settings, resume=True) == [(STEPS, "", 0)] * 2, moment
        is_the_undisturbed_run(folder)


def test_signals_at_drawn_moments_lose_nothing(folder: Path) -> None:
    """Again and again, on either rank, until it is through; also while held-out text is read, where all steps are made
    and saved."""
    run(folder, "run.out=straight", "checkpoint.every=0")
    draw, made = Random(9), 0
    for _ in range(12):
        name = draw.choice(["SIGTERM", "SIGINT", "SIGUSR1"])
        moments = {draw.randrange(2): partial(after, draw.uniform(0.0, 0.12), name)}
        ended = run(folder, "checkpoint.every=2", "run.log_every=1", resume=bool(made), moments=moments)
        assert len(set(ended)) == 1, ended
        assert ended[0][0] > made
        made = ended[0][0]
        if made == STEPS:
            break
    assert made == STEPS
    assert steps(folder) == steps(folder, "straight")
    assert folders.newest(folder / "out/checkpoints").manifest.step == STEPS


@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_in_a_layout_any_rank_may_be_asked(folder: Path, layout: tuple[int, int, int]) -> None:
    dp, tp, pp = layout
    settings = [f"parallel.dp={dp}", f"parallel.tp={tp}", f"parallel.pp={pp}", "zero.level=1", "checkpoint.every=0"]
    ended = run(folder, *settings, world=4, moments={3: partial(in_call, Engine, "step", 2, "SIGTERM")})
    assert len(set(ended)) == 1 and ended[0][1:] == ("SIGTERM", 143) and ended[0][0] in (2, 3)


def test_during_evaluation_the_steps_are_saved_and_it_ends(folder: Path) -> None:
    begin = partial(in_call, Engine, "evaluate", 1, "SIGTERM")
    ended = run(folder, "checkpoint.every=0", moments={0: begin})
    assert ended == [(STEPS, "SIGTERM", 143)] * 2
    assert events(folder)[-1]["checkpoint"] == f"out/checkpoints/step-{STEPS:08}"


def test_where_another_run_has_its_checkpoints_nothing_is_saved_and_that_is_said(folder: Path) -> None:
    run(folder, "run.out=other", "run.stop_after=1", "checkpoint.folder=kept", "checkpoint.every=1")
    begin = partial(in_call, Engine, "step", 2, "SIGUSR1")
    ended = run(folder, "checkpoint.every=0", "checkpoint.folder=kept", moments={0: begin})
    assert ended[0][1:] == ("SIGUSR1", 138), "not 0, which says that it is saved"
    last = events(folder)[-1]
    assert last["checkpoint"] is None and "another run" in last["message"]
    assert [one.name for one in (folder / "kept").iterdir()] == ["step-00000001"]
