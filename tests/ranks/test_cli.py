"""The command as a user runs it: what it prints, what it leaves behind, and how it ends."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len

from tests.command import CONFIG, ZERO3D, fill, zero3d
from zero3d.config import Config
from zero3d.records import TensorBoard

pytestmark = pytest.mark.cli

STEP_KEYS = ["event", "step", "loss", "tokens", "grad_norm", "lr", "skipped", "seconds"]
DONE_KEYS = [
    "event",
    "steps",
    "train_loss",
    "heldout_loss",
    "tokens_per_second",
    "held_bytes",
    "sent_bytes",
    "checkpoint",
    "trace",
]
FOREVER = ("--set", "run.steps=1000000")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none.toml"], ["no configuration file none.toml"]),
        (["tiny.toml", "--set", "zero.levl=3"], ["zero.levl", "Did you mean zero.level"]),
        (["tiny.toml", "--set", "zero.level=high"], ["takes a whole number"]),
        (["tiny.toml", "--set", "zero.level=4"], ["outside 0 to 3", "3 also parameters"]),
        (["tiny.toml", "--set", "data.global_batch=5"], ["5 = 2 x 2 + 1", "4 or 6"]),
        (["tiny.toml", "--set", "data.global_batch=1"], ["fewer samples than ranks"]),
        (["tiny.toml", "-n", "3"], ["parallel.dp = 2 needs 2 ranks, and 3 are started"]),
        (["tiny.toml", "--set", "data.source=none.txt"], ["there is no /", "/none.txt"]),
        (["tiny.toml", "--set", "optimizer.warmup=9"], ["more than run.steps = 4", "run.stop_after"]),
        (
            ["tiny.toml", "--a-word-that-is-longer-than-a-narrow-window-is-wide"],
            ["--a-word-that-is-longer-than-a-narrow"],
        ),
        (["tiny.toml", "--set", "data.source=empty"], ["empty"]),
        (["tiny.toml", "--set", "data.sequence_length=100000"], ["sequence"]),
        (["tiny.toml", "--set", "run.out=text.py/out"], ["run.out", "cannot be written"]),
        (["tiny.toml", "--set", "model.path=mine:build"], ["--allow-code"]),
        (["tiny.toml", "--set", "optimizer.name=adamx"], ["adamx", "adamw"]),
        (
            ["tiny.toml", "--set", "parallel.dp=100000", "--set", "data.global_batch=100000"],
            ["100000 ranks", "memory free", "at most"],
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_bad_input_leaves_with_2_before_any_rank_starts(folder: Path, words: list[str], told: list[str]) -> None:
    (folder / "empty").mkdir()
    done = zero3d(folder, "train", *words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 4, "one short text"
    for part in told:
        assert part in done.stderr
    assert not (folder / "out" / "metrics.jsonl").exists()


def test_a_model_too_large_for_the_machine_is_refused(folder: Path) -> None:
    done = zero3d(folder, "train", "tiny.toml", "--set", "model.width=65536", "--set", "model.layers=96")
    assert done.returncode == 2
    assert "of model states each need about" in done.stderr and "zero.level" in done.stderr


def test_with_json_an_error_is_a_line_too(folder: Path) -> None:
    done = zero3d(folder, "train", "tiny.toml", "--json", "--set", "zero.level=4")
    event = json.loads(done.stdout)
    assert list(event) == ["event", "code", "message", "hint"]
    assert event["event"] == "error" and event["code"] == done.returncode == 2
    assert event["message"] in done.stderr


def test_debug_shows_the_traceback(folder: Path) -> None:
    done = zero3d(folder, "train", "none.toml", "--debug")
    assert done.returncode == 2 and "Traceback" in done.stderr


def test_json_lines_and_the_run_folder(folder: Path) -> None:
    done = zero3d(folder, "train", "tiny.toml", "--json", "--set", "parallel.micro_batch=1")
    assert done.returncode == 0, done.stderr
    *steps, last = map(json.loads, done.stdout.splitlines())
    assert [list(step) for step in steps] == [STEP_KEYS] * 4
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["event"] == "step" and step["tokens"] == 4 * 32 and not step["skipped"] for step in steps)
    assert list(last) == DONE_KEYS and last["event"] == "done" and last["steps"] == 4
    assert last["held_bytes"].keys() == {"weights", "gradients", "optimizer", "activations", "buffers"}
    assert all(len(ranks) == 2 for ranks in last["held_bytes"].values())
    assert len(last["sent_bytes"]["dp"]) == 2 and min(last["sent_bytes"]["dp"]) > 0
    assert last["heldout_loss"] > 0

    metrics = (folder / "out" / "metrics.jsonl").read_text()
    assert metrics == done.stdout
    saved = (folder / "out" / "config.toml").read_text()
    assert "auto" not in saved
    config = Config.load(folder / "out" / "config.toml")
    assert config.parallel.micro_batch == 1 and config.zero.reduce == "micro-batch"

    again = zero3d(folder, "train", "out/config.toml", "--json", "--set", "run.out=again")
    losses = [json.loads(line).get("loss") for line in again.stdout.splitlines()[:-1]]
    assert losses == [step["loss"] for step in steps], "the saved configuration is the one that ran"


def test_the_screen_without_a_terminal(folder: Path) -> None:
    done = zero3d(folder, "train", "tiny.toml", "--set", "zero.level=3")
    assert done.returncode == 0, done.stderr
    for part in (
        "tiny",
        "Who holds what",
        "Predicted model states per rank at each ZeRO level",
        "▸ 3",
        "step 4/4",
        "bits/byte",
        "byte model of order 0",
        "byte model of order 2",
        "Bytes held by each rank",
        "A sample",
        "What to try next",
        "zero3d train tiny.toml --set zero.level=1 --set run.out=out-level1",
        "last 4 training steps",
    ):
        assert part in done.stdout, part
    assert "\x1b[" not in done.stdout
    assert max(map(cell_len, done.stdout.splitlines())) <= 100
    assert "nats" not in done.stdout, "one unit"


def test_what_to_try_next_can_be_run_as_it_stands(folder: Path) -> None:
    """The user's own options, with one thing changed and a folder of its own."""
    own = ["-n", "2", "--set", "run.stop_after=2", "--set", "optimizer.betas=[0.8, 0.9]"]
    done = zero3d(folder, "train", "tiny.toml", *own)
    assert done.returncode == 0, done.stderr
    assert "2 of 4 steps" in done.stdout
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("  zero3d train")]
    assert len(commands) == 3
    outs = set()
    for words in commands:
        assert words[:4] == ["zero3d", "train", "tiny.toml", "-n"] and "optimizer.betas=[0.8, 0.9]" in words
        outs |= {word for word in words if word.startswith("run.out=")}
    assert len(outs) == 3 and "run.out=out" not in outs
    assert not any("stop_after" in word for word in commands[0]), "first of all, the steps that were left out"
    twice = [words for words in commands if "parallel.dp=4" in words]
    assert twice and twice[0][4] == "4"
    again = zero3d(folder, *commands[0][1:])
    assert again.returncode == 0, again.stderr
    assert len((folder / "out-all" / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_second_run_in_the_same_folder_keeps_what_the_first_left(folder: Path) -> None:
    """The second once wrote over the first."""
    out, texts = folder / "out", []
    for number in range(3):
        done = zero3d(folder, "train", "tiny.toml", "--set", f"run.seed={number}", "--set", "run.stop_after=1")
        assert done.returncode == 0, done.stderr
        told = f"earlier records kept as metrics-{number}.jsonl and config-{number}.toml" if number else "─ tiny ─"
        assert told in done.stdout.splitlines()[0]
        texts.append(((out / "metrics.jsonl").read_text(), (out / "config.toml").read_text()))
    assert len(set(texts)) == 3
    for number in (1, 2):
        kept = ((out / f"metrics-{number}.jsonl").read_text(), (out / f"config-{number}.toml").read_text())
        assert kept == texts[number - 1]
    if TensorBoard.is_there():
        assert {path.name for path in (out / "tensorboard").iterdir()} == {"run-1", "run-2", "run-3"}


class Running:
    """`zero3d train --json` that has made its first step, and its ranks."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [*ZERO3D, "train", "tiny.toml", "--json", *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        assert first, self.process.communicate()[1]
        self.ranks = sorted(
            psutil.Process(self.process.pid).children(recursive=True),
            key=lambda one: int(one.environ().get("RANK", "-1")),
        )
        assert len(self.ranks) == 2

    def end(self, seconds: float) -> tuple[int, str]:
        """Exit code and stderr; fails when it takes longer, or when a rank outlives it."""
        began = time.monotonic()
        try:
            _, told = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        assert time.monotonic() - began < seconds
        assert not self.alive(), "a rank lives on"
        return self.process.returncode, told

    def alive(self) -> list[psutil.Process]:
        return [one for one in self.ranks if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    run = Running(folder, *FOREVER)
    yield run
    run.process.kill()
    for rank in run.alive():
        rank.kill()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1", "SIGINT to the group", "SIGINT twice"])
def test_an_interrupt_ends_all_ranks_after_the_step_with_a_checkpoint(running: Running, how: str) -> None:
    """Ctrl-C reaches the group of the terminal; `kill` and `timeout` reach the command alone. 130 for Ctrl-C, 143 for
    SIGTERM; SIGUSR1 asks for no more than what it gets: 0. The same again ends it at once."""
    if how == "SIGINT to the group":
        os.killpg(running.process.pid, signal.SIGINT)
    else:
        running.process.send_signal(getattr(signal, how.split()[0]))
    if how == "SIGINT twice":
        time.sleep(0.02)
        running.process.send_signal(signal.SIGINT)
    code, told = running.end(60)
    assert code == {"SIGTERM": 143, "SIGUSR1": 0}.get(how, 130), told
    last = re.fullmatch(
        r"zero3d: (interrupted|stopped by \w+) after step ([\d,]+) of 1,000,000;(.*) metrics are in out/metrics.jsonl",
        told.splitlines()[-1],
    )
    assert last, told
    lines = [json.loads(line) for line in (running.folder / "out" / "metrics.jsonl").read_text().splitlines()]
    step = int(last[2].replace(",", ""))
    assert abs(lines[-1]["step"] - step) <= 1, "each line is written with its step"
    if how != "SIGINT twice":  # The second may come when all is done.
        saved = f"out/checkpoints/step-{step:08}"
        assert lines[-1]["event"] == "stopped" and lines[-1]["checkpoint"] == saved
        assert f"saved {saved}; --resume goes on from it;" in last[3] and (running.folder / saved).is_dir()
    assert "Traceback" not in told


def test_a_killed_rank_ends_the_others_and_is_named(running: Running) -> None:
    running.ranks[1].kill()
    code, told = running.end(30)
    assert code == 4 and "rank 1 was ended by SIGKILL" in told
    assert "Traceback" not in told


def test_ranks_listen_to_this_machine_alone_and_end_with_the_command(running: Running) -> None:
    for process in [psutil.Process(running.process.pid), *running.ranks]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), connection
    running.process.kill()
    running.process.wait()
    deadline = time.monotonic() + 5
    while running.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running.alive()


MINE = """
import os
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        if self.calls == 2 and os.environ["RANK"] == "1":
            raise ValueError("the second batch is cursed")
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x @ self.embed.weight.T

def build():
    return Mine()
"""


def test_an_error_on_one_rank_is_told_once_and_names_the_rank(folder: Path) -> None:
    (folder / "mine.py").write_text(MINE)
    (folder / "mine.toml").write_text(CONFIG.replace("width = 32\nlayers = 2\nheads = 2", 'path = "mine:build"'))
    done = zero3d(folder, "train", "mine.toml", "--allow-code")
    assert done.returncode == 4
    assert done.stderr.count("the second batch is cursed") == 1 and "rank 1" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 3


@pytest.mark.parametrize(
    ("signature", "told"), [("ids", "forward(ids) takes no keyword `tokens`"), ("tokens, mask", "needs 'mask'")]
)
def test_a_forward_that_cannot_be_called_is_refused_before_any_rank_starts(
    folder: Path, signature: str, told: str
) -> None:
    (folder / "mine.py").write_text(MINE.replace("self, tokens", f"self, {signature}"))
    (folder / "mine.toml").write_text(CONFIG.replace("width = 32\nlayers = 2\nheads = 2", 'path = "mine:build"'))
    done = zero3d(folder, "train", "mine.toml", "--allow-code")
    assert done.returncode == 2 and told in done.stderr
    assert "[B, T] ids" in done.stderr and "[B, T, vocabulary]" in done.stderr
    assert not (folder / "out" / "metrics.jsonl").exists()


def test_a_note_is_shown_and_is_an_event_before_the_first_step(folder: Path) -> None:
    """At level 3 a model without a list of blocks gets one; who reads events by name is not disturbed."""
    plain = MINE.replace("nn.ModuleList(nn.Linear(16, 16) for _ in range(2))", "[]").replace('== "1"', '== "none"')
    (folder / "mine.py").write_text(plain.replace("self, tokens", "self, *, tokens"))
    (folder / "mine.toml").write_text(CONFIG.replace("width = 32\nlayers = 2\nheads = 2", 'path = "mine:build"'))
    words = ["train", "mine.toml", "--allow-code", "--set", "zero.level=3"]
    done = zero3d(folder, *words, "--json")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["note"] + ["step"] * 4 + ["done"]
    assert list(events[0]) == ["event", "message"] and "model.blocks" in events[0]["message"]
    shown = zero3d(folder, *words).stdout
    assert "│ note " in shown and "model.blocks" in shown
    assert "--allow-code" in shown, "in what to try next"


def test_under_torchrun(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "-m", "zero3d", "train", "tiny.toml", "--json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert events == ["step"] * 4 + ["done"]
    bad = subprocess.run(
        [*words, "--set", "data.global_batch=5"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert bad.returncode != 0
    assert bad.stderr.count("zero3d: rank") == 1 and "5 = 2 x 2 + 1" in bad.stderr, "told by one rank"


def test_a_folder_is_written_by_one_run_at_a_time(running: Running) -> None:
    done = zero3d(running.folder, "train", "tiny.toml")
    assert done.returncode == 2
    assert "another run is writing into run.out = 'out'" in done.stderr and "run.out=runs/mine" in done.stderr
    assert running.process.poll() is None


def test_ranks_train_on_what_was_checked_though_the_source_changes(folder: Path) -> None:
    """The run's own folder lies in its source: each rank made token files of its own, of different lengths."""
    for _ in range(2):
        done = zero3d(folder, "train", "tiny.toml", "--set", "data.source=.", "--set", "run.steps=2")
        assert done.returncode == 0, done.stderr
    names = [path.name for path in (folder / "out" / "tokens").glob("train-*.bin")]
    assert len(names) == 2, "one a run"
