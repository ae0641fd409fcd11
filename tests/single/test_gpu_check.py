"""scripts/gpu_check.py with tiny sizes, and the runs of tests/gpu, on a CPU: all of their logic that needs no GPU."""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
NEAR = 0.03
"""Padding of buckets, beside numbers of a formula."""


def script(name: str) -> ModuleType:
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_runs = script("gpu_runs")
gpu_check = script("gpu_check")


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    words = [str(SCRIPTS / "gpu_check.py"), "--cpu", "--steps", "1", "--minutes", "9", "--run-limit", "200"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600, check=True)
    assert "largest" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_run_is_measured(table: dict[str, Any]) -> None:
    assert [one["run"] for one in table["runs"]] == list(gpu_runs.RUNS)
    assert table["not_reached"] == []
    for one in table["runs"]:
        assert one["held_states"] == pytest.approx(one["planned_states"], rel=NEAR, abs=0)
        assert one["host"] == pytest.approx(one["planned_host"], rel=NEAR, abs=0)
        assert one["measured_peak"] < 1.5 * one["planned_peak"]
        assert one["left_after_close"] == 0 and one["step_seconds"] > 0
        # What a step leaves under way counts for the next one, and with so few there may be none.
        worked = [one["split"][key] for key in ("down", "update", "up")]
        assert (sum(worked) > 0) == bool(one["offload"])


def test_levels_and_offload_have_the_same_losses(table: dict[str, Any]) -> None:
    """In every bit; but for the delayed update, whose third forward lacks the second update."""
    delayed = "level 2, host, delayed"
    assert table["losses"] == {"same_bits": [run for run in gpu_runs.RUNS if run != delayed], "largest_difference": 0.0}
    losses = {one["run"]: one["losses"] for one in table["runs"]}
    assert losses[delayed][:2] == losses["level 0"][:2]
    assert losses[delayed][2] != losses["level 0"][2]


def test_offload_makes_room_for_more_layers(table: dict[str, Any]) -> None:
    plain, offloaded = table["largest"]
    for one in table["largest"]:
        assert one["complete"] and 0 < one["layers"] < one["refused_layers"] and one["why"] == "device memory"
        assert one["layers"] == pytest.approx(one["planned_layers"], rel=0.3, abs=1)
    assert offloaded["layers"] > 4 * plain["layers"]


@pytest.mark.parametrize("most", [1, 2, 7, 100, 1000])
@pytest.mark.parametrize("guess", [1, 6, 90, 2000])
def test_the_search_ends_at_the_largest(most: int, guess: int) -> None:
    found = gpu_check.largest(lambda number: number <= most, guess, lambda: False)
    assert found.complete and found.best <= most < found.refused <= found.best + max(found.best // 32, 1)
    assert gpu_check.deepest(lambda number: number <= most) == most
    assert all(fitted == (number <= most) for number, fitted in found.trials)


def test_the_search_ends_when_time_is_over_or_a_try_says_nothing() -> None:
    left = iter([False, False, True])
    found = gpu_check.largest(lambda number: number <= 50, 40, lambda: next(left))
    assert found.trials == [(40, True), (45, True)] and (found.best, found.complete) == (45, False)
    found = gpu_check.largest(lambda number: None, 40, lambda: False)
    assert found.trials == [(40, None)] and (found.best, found.complete) == (0, False)
    nothing = gpu_check.largest(lambda number: False, 3, lambda: False)
    assert (nothing.best, nothing.refused, nothing.complete) == (0, 1, True)


def serve_badly(end: Any, jobs: Sequence[dict[str, Any]]) -> None:
    """Answers, hangs or dies as each job says."""
    for job in jobs:
        if job["does"] == "hang":
            time.sleep(60)
        if job["does"] == "die":
            sys.exit(1)
        end.send({"did": job["does"]})


def test_runs_go_on_after_one_that_hangs_or_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runs, "START", 20.0)
    jobs = [{"does": does, "seconds": 0.5} for does in ("well", "hang", "well", "die", "well")]
    answers = [answer for _, answer in gpu_runs.in_processes(jobs, lambda: 60.0, serve_badly, ())]
    assert [answer.get("did") for answer in answers] == ["well", None, "well", None, "well"]
    assert "no answer" in answers[1]["error"] and "ended" in answers[3]["error"]
    assert next(gpu_runs.in_processes(jobs, lambda: 0.0))[1] == {"not_reached": "no time was left"}


def test_the_runs_of_the_gpu_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU queues are threads, and pauses stop them."""
    import torch

    from tests.gpu import runs
    from tests.gpu import test_offload_streams as streams
    from tests.world import run_ranks
    from zero3d.offload import queues

    cpu = torch.device("cpu")
    case = runs.config(3, "bf16", runs.ALL_ON_HOST)
    with monkeypatch.context() as patch:
        patch.setattr(queues, "Queue", runs.queue_with(runs.slowed(0.001)))
        assert runs.same(runs.trained(case), runs.trained(runs.config(3, "bf16")))
    with monkeypatch.context() as patch:
        streams.test_the_first_bucket_is_down_before_backward_ends(3, runs.ALL_ON_HOST, cpu, patch)
    with monkeypatch.context() as patch:
        streams.test_the_first_weights_are_up_before_the_last_bucket_is_updated(2, runs.HOST, patch)
    streams.test_staging_is_pinned_and_bounded(cpu)
    assert run_ranks(1, runs.over_a_group_of_one, "gloo", str(tmp_path / "own"), [(3, runs.ALL_ON_HOST)]) == [[]]
