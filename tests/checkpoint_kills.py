"""Runs that are killed at random moments of saving and resuming, and started again.

.venv/bin/python -m tests.checkpoint_kills 200        by hand: some minutes
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero3d
from tests.checkpoint_runs import resumed, saved
from tests.pipeline_runs import adamw
from tests.world import RankError, run_ranks
from zero3d.checkpoint.folders import keep

STEPS, BOTH = 12, 2


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean() + output.mean()


def run(folder: Path, victim: int | None, seconds: float) -> tuple[float, Tensor]:
    """Resumes, trains to the end and saves after each step. `victim`: the rank that is killed after `seconds`, or
    `BOTH`; it trains on and on until then."""
    torch.manual_seed(0)
    engine = zero3d.Engine(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), squares, adamw, OPTIONS)
    if victim in (engine.rank, BOTH):
        threading.Thread(target=_kill, args=(seconds,), daemon=True).start()
    first = 0
    if any(folder.glob("step-*[0-9]")):
        first = resumed(engine, folder).step
    loss = engine.evaluate(batch(first)).loss
    while first < STEPS or victim is not None:
        if first < STEPS:
            engine.step(batch(first))
            first += 1
        loss = engine.evaluate(batch(first)).loss
        saved(engine, folder, step=first)
        if engine.rank == 0:
            keep(folder, last=2)
    return loss, engine.weight_of("0.weight")


OPTIONS: dict[str, Any] = {"parallel": {"micro_batch": 2}, "zero": {"level": 3}}


def batch(step: int) -> Tensor:
    return torch.ones(2, 64) * (step + 1)


def _kill(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def kill(folder: Path, number: int, seed: int) -> None:
    """`number` kills; then the run ends as one that was never killed."""
    draw = random.Random(seed)
    straight = run_ranks(2, run, folder / "straight", None, 0.0)[0]
    for _ in range(number):
        try:
            run_ranks(2, run, folder / "killed", draw.choice([0, 1, BOTH]), draw.random() * 0.6, group_timeout=10)
        except RankError as error:
            # What a rank sees whose mate was killed, or what is seen of one that was.
            assert "RankFailedError" in str(error) or "ended without a word" in str(error), error
    end = run_ranks(2, run, folder / "killed", None, 0.0)[0]
    assert end[0] == straight[0] and torch.equal(end[1], straight[1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        kill(Path(place), int(sys.argv[1]), seed=0)
    sys.stdout.write(f"{sys.argv[1]} kills: the run ended as one without\n")
