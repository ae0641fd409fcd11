"""`zero3d report` of real runs: what they planned beside what they held, traced, resumed, killed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command import ZERO3D, fill, zero3d
from zero3d.records import METRICS
from zero3d.report import contents
from zero3d.report.traced import spent

pytestmark = [pytest.mark.ranks, pytest.mark.cli]

STAGES = ("--set", "parallel.pp=2", "--set", "parallel.dp=1", "--set", "parallel.micro_batch=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


def reported(folder: Path) -> dict[str, Any]:
    done = zero3d(folder, "report", "out", "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert (folder / told["page"]).stat().st_size > 1_000_000
    return told


def test_a_traced_run_over_stages_and_one_that_goes_on_with_offload(folder: Path) -> None:
    """Planned model states are what is held but for padding; a trace of real ranks adds up to their steps."""
    done = zero3d(folder, "train", "tiny.toml", *STAGES, "--trace", "--set", "checkpoint.every=2")
    assert done.returncode == 0, done.stderr
    told = reported(folder)
    assert told["state"] == "done" and told["steps"] == 4 and told["problems"] == []
    assert told["layout"] == {"dp": 1, "tp": 1, "pp": 2}
    assert sorted(rank for one in told["held_bytes"] for rank in one["ranks"]) == [0, 1]
    for one in told["held_bytes"]:
        for kind in ("weights", "gradients", "optimizer"):
            assert 0.9 < one["planned"][kind] / one["measured"][kind] <= 1, (kind, one)
    assert [one["step"] for one in told["checkpoints"]] == [4, 2] and all(one["whole"] for one in told["checkpoints"])
    run = contents.read(folder / "out")
    assert run.trace is not None
    for rank, one in enumerate(spent(run.trace)):
        steps = list(run.trace.of(rank, "step"))
        assert one.total == pytest.approx(sum(step.seconds for step in steps) / len(steps), rel=1e-3)
        assert {"forward", "backward", "update", "wait for pp"} <= {*one.seconds}

    # On dp 2 alone, with offload, of which the planned bytes are those that are held.
    offload = ("--set", "offload.optimizer=host", "--set", "run.steps=6")
    on = zero3d(folder, "train", "tiny.toml", *offload, "--resume")
    assert on.returncode == 0, on.stderr
    told = reported(folder)
    assert told["resumed"] == [4] and told["step"] == 6 and told["layout"] == {"dp": 2, "tp": 1, "pp": 1}
    assert any("resumed after step 4" in one for one in told["problems"])
    assert any("The trace is of an earlier part of the run, on dp 1 x tp 1 x pp 2" in one for one in told["problems"])
    for one in told["held_bytes"]:
        assert one["planned"]["host"] == one["measured"]["host"] > 0
        assert one["planned"]["staging"] == one["measured"]["staging"]
    assert set(told["offload"]) == {"compute", "down", "update", "up", "hidden"}


def test_a_run_has_a_page_while_it_runs_and_after_it_was_killed(folder: Path) -> None:
    run = subprocess.Popen(
        [*ZERO3D, "train", "tiny.toml", "--set", "run.steps=100000", "--json"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        metrics, ends = folder / "out" / METRICS, time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size > 2000):
            assert run.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        told = reported(folder)
        assert told["state"] == "running" and told["step"] > 3 and told["steps"] == 100000
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    told = reported(folder)
    assert told["state"] == "cut short" and told["step"] > 3 and told["heldout_loss"] is None
    assert told["held_bytes"][0].keys() == {"ranks", "planned"}
