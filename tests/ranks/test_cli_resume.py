"""Runs of `zero3d train` that are killed, and go on with `--resume` as if nothing had been.

Most of them are forked: what a rank of the command does, without the seconds that its interpreter takes. Losses and
gradient norms are those of `metrics.jsonl`: on the same layout in every bit, on others within 1e-5.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import ZERO3D, fill, zero3d
from tests.world import RankError, run_ranks
from zero3d import train
from zero3d.checkpoint import folders, mine, save
from zero3d.cli.options import Options
from zero3d.cli.train import read_on_rank
from zero3d.errors import Zero3dError
from zero3d.offload.update import HostPieces
from zero3d.records import RunFolder
from zero3d.reports import StepReport

pytestmark = [pytest.mark.alone, pytest.mark.cli]

STEPS = 8
FOREVER = "run.steps=1000000"
"""The learning rate hangs on it, so it is the same in runs that are compared; `run.stop_after` ends them."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


def on_rank(folder: Path, world: int, settings: tuple[str, ...], resume: bool, kill: "Kill | None") -> str:
    """What one rank of the command does. -> the error that it ends with."""
    os.chdir(folder)
    if kill is not None:
        kill()
    options = Options(
        config=Path("tiny.toml"), settings=settings, ranks=None, json=False, debug=False, allow_code=False
    )
    try:
        config, prepared, build = read_on_rank(options, world)
        train.train(config, prepared, build, [RunFolder(Path(config.run.out))], resume=resume)
    except Zero3dError as error:
        return f"{error.exit_code}: {error}"
    return ""


def run(folder: Path, *settings: str, world: int = 2, resume: bool = False, kill: "Kill | None" = None) -> list[str]:
    """-> by rank."""
    words = (FOREVER, f"run.stop_after={STEPS}", "checkpoint.every=2", f"parallel.dp={world}", *settings)
    return run_ranks(world, on_rank, folder, world, words, resume, kill)


def events(folder: Path, out: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path, out: str = "out") -> list[tuple[int, float, float, float]]:
    return [
        (one["step"], one["loss"], one["grad_norm"], one["lr"]) for one in events(folder, out) if one["event"] == "step"
    ]


def notes(folder: Path) -> str:
    return " ".join(one["message"] for one in events(folder) if one["event"] == "note")


def checkpoints(folder: Path, out: str = "out/checkpoints") -> list[str]:
    return sorted(one.name for one in (folder / out).iterdir())


def started(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*ZERO3D, "train", "tiny.toml", "--set", FOREVER, "--set", "checkpoint.every=2", *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill_once_saved(process: "subprocess.Popen[str]", folder: Path, step: int) -> None:
    """SIGKILL to all of it, when a checkpoint of that step or a later one is whole."""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline and process.poll() is None:
            found = folders.candidates(folder / "out/checkpoints") if (folder / "out/checkpoints").is_dir() else []
            if found and int(found[0].name[5:13]) >= step:
                return
            time.sleep(0.01)
        raise AssertionError(f"no checkpoint was saved: {process.poll()}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_command_that_is_killed_goes_on_where_it_was(folder: Path) -> None:
    """It is then the run that was never killed, in every bit, and metrics.jsonl has each step once. What cannot go on
    leaves with 2."""
    kill_once_saved(started(folder), folder, 2)
    last = steps(folder)[-1][0] + 3
    words = ("--set", FOREVER, "--set", f"run.stop_after={last}", "--resume", "--json")
    done = zero3d(folder, "train", "tiny.toml", *words)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert next(one for one in told if one["event"] == "step")["step"] > 2
    assert told[-1]["steps"] == last
    assert "goes on from out/checkpoints/step-0" in told[0]["message"] and "goes on from" in done.stderr
    assert [step for step, *_ in steps(folder)] == list(range(1, last + 1))
    run(folder, "run.out=straight", f"run.stop_after={last}", "checkpoint.every=0")
    assert steps(folder) == steps(folder, "straight")
    ends = [[one for one in events(folder, out) if one["event"] == "done"] for out in ("out", "straight")]
    assert len(ends[0]) == 1 and ends[0][0]["heldout_loss"] == ends[1][0]["heldout_loss"]

    refused = zero3d(folder, "train", "tiny.toml", *words[:4], "--resume", "--set", "run.seed=1")
    assert refused.returncode == 2 and "run.seed" in refused.stderr and "Traceback" not in refused.stderr
    assert "without --resume" in refused.stderr


Kill = Callable[[], None]
"""Called on a rank before it trains: makes it end itself by SIGKILL at some moment."""


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after_step(number: int) -> Kill:
    """Rank 0 has told of this step, and not saved anything of it."""

    def begin() -> None:
        stepped = RunFolder.stepped

        def and_end(self: RunFolder, report: StepReport) -> None:
            stepped(self, report)
            if report.step == number:
                end()

        RunFolder.stepped = and_end  # type: ignore[method-assign]

    return begin


def in_call(owner: Any, name: str, number: int) -> Kill:
    """Instead of the so manieth call of this."""

    def begin() -> None:
        call, calls = getattr(owner, name), 0

        def or_end(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                end()
            return call(*arguments, **options)

        setattr(owner, name, or_end)

    return begin


def in_third_file() -> Kill:
    """When half of its tensors are written."""

    def begin() -> None:
        write, calls = mine.write, 0

        def half(planned: Any, path: Path, source: Any) -> Any:
            nonlocal calls
            calls += 1
            left = len(planned.outs) // 2

            def or_end(out: Any) -> Any:
                nonlocal left
                left -= 1
                if calls == 3 and not left:
                    end()
                return source(out)

            return write(planned, path, or_end)

        mine.write = half

    return begin


HALF_OF_STEP_5 = 4 * 12 + 6
"""Of the 12 updates of shards that a rank makes in a step."""
MOMENTS: dict[str, tuple[Kill, list[str]]] = {
    "after a step": (after_step(5), []),
    "while a file is written": (in_third_file(), []),
    "before the manifest": (in_call(save, "dump", 2), []),
    "before what is kept is tidied": (in_call(folders, "keep", 2), []),
    "in an update on the host": (in_call(HostPieces, "step", HALF_OF_STEP_5), ["offload.optimizer=host"]),
    "in an update on disk": (
        in_call(HostPieces, "step", HALF_OF_STEP_5),
        ["offload.optimizer=disk", "offload.folder=disk"],
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_is_killed_at_a_certain_moment_goes_on(folder: Path, moment: str) -> None:
    """And ends as one that was not, in every bit; with offload too, where half of the shards have been updated."""
    kill, settings = MOMENTS[moment]
    settings = [*settings, "zero.level=3", "zero.bucket_mb=0.01"]
    with pytest.raises(RankError, match=r"ended without a word|RankFailedError"):
        run(folder, *settings, kill=kill)
    assert 4 <= len(steps(folder)) < STEPS and not [one for one in events(folder) if one["event"] == "done"]
    assert run(folder, *settings, resume=True) == ["", ""]
    assert "goes on from out/checkpoints/step-0" in notes(folder) and events(folder)[-1]["steps"] == STEPS
    assert run(folder, *settings, "run.out=straight") == ["", ""]
    assert steps(folder) == steps(folder, "straight") and len(steps(folder)) == STEPS
    assert checkpoints(folder) == ["step-00000006", "step-00000008"], "and nothing that the killed one left"


def test_records_survive_a_kill_as_they_are_taken_up_again(folder: Path) -> None:
    run(folder, "run.stop_after=4")
    before = events(folder)
    with pytest.raises(RankError, match=r"ended without a word|RankFailedError"):
        run(folder, resume=True, kill=in_call(Path, "replace", 1))
    assert events(folder) == before
    run(folder, resume=True)
    assert [step for step, *_ in steps(folder)] == list(range(1, STEPS + 1))


def test_a_run_goes_on_in_other_layouts_and_at_other_levels(folder: Path) -> None:
    run(folder, "run.out=straight")
    layouts = [
        (1, ["zero.level=0"]),
        (4, ["zero.level=3", "checkpoint.background=false"]),
        (4, ["parallel.dp=2", "parallel.tp=2", "zero.level=2", "offload.optimizer=host"]),
    ]
    for number, (world, settings) in enumerate(layouts):
        out = f"run.out=run{number}"
        assert run(folder, out, "run.stop_after=4", "zero.level=1") == ["", ""]
        assert run(folder, out, *settings, world=world, resume=True) == [""] * world
        found, expected = steps(folder, f"run{number}"), steps(folder, "straight")
        assert [step for step, *_ in found] == list(range(1, STEPS + 1))
        for one, other in zip(found, expected):
            assert one == pytest.approx(other, rel=1e-5), (settings, one, other)


def test_with_nothing_to_go_on_from_it_begins_and_says_so(folder: Path) -> None:
    assert run(folder, "run.stop_after=3", resume=True) == ["", ""]
    assert "There is no checkpoint in out: the run begins anew." in notes(folder)
    assert [step for step, *_ in steps(folder)] == [1, 2, 3]
    assert checkpoints(folder) == ["step-00000002", "step-00000003"], "and after the last step"


def test_what_a_start_has_done_is_told_apart_from_all_of_the_run(folder: Path) -> None:
    """And what to try next begins in a folder of its own, where there is nothing to go on with."""
    run(folder, "run.stop_after=5")
    words = ("--set", FOREVER, "--set", "run.stop_after=8", "--set", "parallel.dp=2", "--resume")
    done = zero3d(folder, "train", "tiny.toml", *words)
    assert done.returncode == 0, done.stderr
    assert "Done  3 steps (8 in all)" in done.stdout
    following = [line for line in done.stdout.splitlines() if line.strip().startswith("zero3d train")]
    assert following and not any("--resume" in line for line in following)


def test_a_damaged_checkpoint_is_left_out_and_named(folder: Path) -> None:
    """A byte of the newest has changed: the one before it is taken, and what followed is made again, alike."""
    run(folder, "run.stop_after=6")
    before = steps(folder)
    damaged = folder / "out/checkpoints/step-00000006/rank-00001.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert run(folder, resume=True) == ["", ""]
    told = notes(folder)
    assert "goes on from out/checkpoints/step-00000004" in told and "not used: step-00000006" in told
    assert steps(folder)[:6] == before and len(steps(folder)) == STEPS
    for step in (6, 8):
        assert folders.whole(folder / f"out/checkpoints/step-0000000{step}"), "saved anew"


def test_what_cannot_go_on_is_refused_with_the_way_out(folder: Path) -> None:
    """Exit code 2 on every rank; the run's records and checkpoints are as they were."""
    run(folder, "run.stop_after=4")
    (folder / "another.py").write_text((folder / "text.py").read_text() * 2)
    kept = (folder / "out/metrics.jsonl").read_text(), checkpoints(folder)
    for setting, told, way in [
        ("run.stop_after=4", "step 4, and there are 4 steps in all", "run.stop_after) to more"),
        ("run.seed=3", "run.seed = 0, and now it is 3", "Set it back"),
        ("data.global_batch=8", "data.global_batch = 4, and now it is 8", "Set it back"),
        ("data.sequence_length=16", "", ""),
        ("data.source=another.py", "data.source = 'text.py', and now it is 'another.py'", "another run.out"),
        ("model.width=64", "", ""),
    ]:
        for error in run(folder, setting, resume=True):
            assert error.startswith("2: ") and told in error and way in error and "\n" in error, (setting, error)
        assert kept == ((folder / "out/metrics.jsonl").read_text(), checkpoints(folder)), setting


def test_which_checkpoints_stay(folder: Path) -> None:
    run(folder, "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=3")
    assert checkpoints(folder) == [f"step-0000000{step}" for step in (3, 6, 7, 8)]
    assert events(folder)[-1]["checkpoint"] == "out/checkpoints/step-00000008"
    # A run that begins anew takes no other run's name, and removes nothing of it.
    run(folder, "checkpoint.every=0", "run.stop_after=2")
    assert checkpoints(folder, "out/checkpoints-1") == [f"step-0000000{step}" for step in (3, 6, 7, 8)]
    assert not (folder / "out/checkpoints").exists() and events(folder)[-1]["checkpoint"] is None
    run(folder, "checkpoint.background=false", "checkpoint.keep=1", "run.stop_after=5")
    assert checkpoints(folder) == ["step-00000005"]


def test_what_a_checkpoint_lacks_is_refused_until_it_is_allowed(folder: Path) -> None:
    assert run(folder, "run.stop_after=4") == ["", ""]
    before = steps(folder)
    words = ("--set", FOREVER, "--set", "run.stop_after=6", "--set", "checkpoint.every=2", "--set", "parallel.dp=2")
    other = (*words, "--set", "optimizer.name=sgd", "--resume")
    refused = zero3d(folder, "train", "tiny.toml", *other)
    assert refused.returncode == 2
    assert "exp_avg of" in refused.stderr
    assert "--allow-missing" in refused.stderr
    alone = zero3d(folder, "train", "tiny.toml", *words, "--allow-missing")
    assert alone.returncode == 2
    assert steps(folder) == before
    allowed = zero3d(folder, "train", "tiny.toml", *other, "--allow-missing")
    assert allowed.returncode == 0, allowed.stderr
    assert "left out: exp_avg of" in " ".join(allowed.stdout.split())
    assert [step for step, *_ in steps(folder)] == [1, 2, 3, 4, 5, 6]
