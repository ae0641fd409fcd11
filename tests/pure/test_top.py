"""`zero3d top`: a run as it is at this moment, from the files of its folder alone."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from zero3d.cli.top import picture
from zero3d.report.following import END, look

STEP = {"event": "step", "loss": 2.0, "tokens": 128, "grad_norm": 1.0, "lr": 1e-3, "skipped": False, "seconds": 0.5}
RANKS = {
    "event": "ranks",
    "step": 10,
    "busy_seconds": [0.1, 0.1, 0.4],
    "memory_bytes": [10**8, 10**8, 2 * 10**8],
    "waited_seconds": {"dp": 0.2},
    "sent_bytes": {"dp": 4000000},
}
PLAN = {
    "world": 3, "device": "cpu", "dp": 3, "tp": 1, "pp": 1, "level": 0, "group": 3, "parameters": 10, "trainable": 10,
    "dtypes": [["weights", "fp32"]], "stages": [[[0, 1]]],
    "states": [[{"weights": 40, "gradients": 40, "optimizer": 80}]],
    "held_bytes": {kind: [40, 40, 40] for kind in ("weights", "gradients", "optimizer")},
    "steps": 40, "train_tokens": 1000, "documents": 1, "vocabulary": 256, "bits_per_nat": None, "first_step": 0,
    "resumed": "",
}  # fmt: skip


def write(folder: Path, *events: dict[str, Any], plan: bool = True) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if plan:
        (folder / "plan.json").write_text(json.dumps(PLAN))
        (folder / "config.toml").write_text('[run]\nname = "mine"\n')
    return folder


def steps(number: int) -> list[dict[str, Any]]:
    return [{**STEP, "step": step, "loss": 3.0 - step / 20} for step in range(1, number + 1)]


def shown(folder: Path, now: float, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(look(folder, now)))
    return console.export_text()


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    notice = {"event": "notice", "step": 9, "kind": "slow-rank", "rank": 2, "message": "rank 2 is slow"}
    folder, now = write(tmp_path, *steps(10), RANKS, notice), time.time()
    found = look(folder, now)
    assert (found.state, found.step, found.steps, found.run) == ("running", 10, 40, "mine")
    assert found.loss == 2.5 and found.tokens_per_second == 256 and found.seconds_left == 15
    assert found.skew == pytest.approx(3.0) and found.checkpoint is None
    text = shown(folder, now)
    for part in ("mine", "running", "10 of 40", "0:15 left", "2.500 nats/token", "256 tokens/s", "dp 4.00 MB a step",
                 "rank 2", "busy 400 ms", "200 MB", "! step 9: rank 2 is slow", "dp 3 x tp 1 x pp 1"):  # fmt: skip
        assert part in text, part
    assert max(map(cell_len, text.splitlines())) <= 80


def test_what_ended_says_how(tmp_path: Path) -> None:
    now = time.time()
    assert look(write(tmp_path, *steps(3)), now + 3600).state == "ended"
    assert "ended without a last word, 1:00:0" in shown(tmp_path, now + 3600)
    end = {"event": "stopped", "step": 3, "steps": 40, "signal": "SIGTERM", "checkpoint": "c", "message": "saved c"}
    assert look(write(tmp_path, *steps(3), end), now).state == "stopped" and "saved c" in shown(tmp_path, now)
    assert look(write(tmp_path, *steps(3), end, *steps(5)), now).state == "running", "it was resumed"
    done = {"event": "done", "steps": 40, "heldout_loss": 2.25, "held_bytes": {"weights": [5, 7]}, "checkpoint": None}
    found = look(write(tmp_path, *steps(3), done), now + 3600)
    assert found.state == "done" and found.step == 40 and found.held_bytes == {"weights": 7} and found.measured
    assert found.seconds_left is None and found.heldout_loss == 2.25


def test_a_run_whose_lock_is_held_runs_however_long_it_is_silent(tmp_path: Path) -> None:
    import fcntl

    write(tmp_path, *steps(3))
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert look(tmp_path, time.time()).state == "running"
        assert look(tmp_path, time.time() + 600).state == "late"
        assert "running, but no step for 10:0" in shown(tmp_path, time.time() + 600)
        write(tmp_path)
        assert look(tmp_path, time.time()).state == "starting"


def test_whatever_the_folder_lacks_or_has_broken_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, *steps(2), {"event": "ranks", "busy_seconds": "no", "memory_bytes": [None]}, plan=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    found = look(tmp_path, time.time())
    assert found.step == 2 and found.steps is None and found.busy_seconds == [] and found.memory_bytes == []
    assert "step" in shown(tmp_path, time.time(), width=40)


def test_of_a_long_run_the_end_is_read(tmp_path: Path) -> None:
    line = len(json.dumps({**STEP, "step": 100000}))
    found = look(write(tmp_path, *steps(END // line + 20000)), time.time())
    assert found.step == END // line + 20000 and len(found.losses) < found.step


def test_the_command(tmp_path: Path) -> None:
    """Without a terminal it looks once; what is no run is refused."""
    write(tmp_path, *steps(3))
    words = [sys.executable, "-m", "zero3d", "top"]
    done = subprocess.run([*words, str(tmp_path), "--once", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] == 3 and found["state"] == "running" and found["steps"] == 40 and "skew" in found
    done = subprocess.run([*words, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"step +3 of 40", done.stdout)
    done = subprocess.run([*words, str(tmp_path / "none")], capture_output=True, text=True)
    assert done.returncode == 2 and "there is no" in done.stderr
