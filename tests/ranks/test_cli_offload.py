"""The command with offload: the plan and its bytes, the split of steps, what it refuses, and what it compares."""

import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.command import ZERO3D, fill, zero3d
from zero3d.cli.main import app
from zero3d.cli.offload_tables import host_memory, split_text, what_is_offloaded
from zero3d.config import Config
from zero3d.offload.budget import HostNeed, HostWidths, MachineNeed, need

pytestmark = pytest.mark.cli

BF16 = ("--set", "precision.compute=bf16")
HOST = ("--set", "offload.optimizer=host", *BF16, "--set", "zero.level=2")
SPLIT = ["compute", "down", "update", "up", "hidden"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


def test_it_says_host_memory_before_and_the_split_after(folder: Path) -> None:
    done = zero3d(folder, "train", "tiny.toml", *HOST)
    assert done.returncode == 0, done.stderr
    note, *steps, last = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    held = last["held_bytes"]
    assert note["event"] == "note" and note["message"].startswith("host memory: 2 ranks need 2 x ")
    total = held["host"][0] + held["staging"][0]
    assert f"2 x {total / 1e3:.1f} kB" in note["message"], "the text counts as the run does"
    assert f" = {2 * total / 1e3:.1f} kB" in note["message"]
    for step in steps:
        assert list(step["offload"]) == SPLIT and all(seconds >= 0 for seconds in step["offload"].values())
        # Each queue is one thread, and what is hidden is a part of what the queues worked.
        assert step["offload"]["compute"] <= step["seconds"]
        assert step["offload"]["hidden"] <= sum(step["offload"][name] for name in ("down", "update", "up"))
    assert list(last["offload"]) == SPLIT
    mean = sum(step["offload"]["update"] for step in steps[1:]) / len(steps[1:])
    assert last["offload"]["update"] == pytest.approx(mean), "as speed is: without the first step"
    assert held["gradients"] == held["optimizer"] == [0, 0] and held["disk"] == [0, 0]
    words = " ".join(done.stdout.split())
    assert "offload optimizer, master weights and gradients on the host, weights on the device" in words
    assert "Host memory that offload takes, of what is free" in words and "each of 0, 1" in words
    assert "pinned" in words and "part 1/2 host" in words and "device host" in words
    assert "Step on average compute" in words and "of it hidden" in words
    assert "on the host staging" in words, "in the table of what was held"
    assert f"{total / 1e3:.0f} kB" in words, "in the table of host memory"


def test_verify_compares_an_offloaded_run_with_a_plain_process(folder: Path) -> None:
    """Files of a disk home too."""
    disk = ("--set", "offload.optimizer=disk", "--set", f"offload.folder={folder / 'state'}", "--set", "zero.level=3")
    done = zero3d(folder, "verify", "tiny.toml", "--steps", "2", *disk)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Close: dp 2, ZeRO level 3, optimizer on disk, and one plain process agree" in done.stdout


def test_show_layout_says_where_the_optimizer_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    shown, listed = (
        CliRunner().invoke(app, ["show", "layout", "tiny.toml", *HOST, *json_too]) for json_too in ([], ["--json"])
    )
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.stdout.split())
    assert "w all g 1/2 host o 1/2 host" in words
    assert "offloaded: optimizer, master weights and gradients on the host, weights on the device" in words
    ranks = json.loads(listed.stdout)["ranks"]
    numel = ranks[0]["parameters"]
    for rank in ranks:
        assert rank["keeps"]["weights"]["bytes"] == 2 * numel
        assert rank["keeps"]["optimizer"] == {"part": [rank["rank"] + 1, 2], "bytes": 0}
        assert rank["away"] == {"host_bytes": 16 * numel // 2, "disk_bytes": 0}


def test_c65_a_limit_below_the_need_is_refused_with_2_and_the_sum(folder: Path) -> None:
    """`ulimit -v`: a rank takes some of it before it has a model, and the rest is less than what the model needs."""
    large = ("--set", "model.width=1024", "--set", "model.layers=12", "--set", "parallel.dp=1")
    words = [*ZERO3D, "train", "tiny.toml", "--json", *HOST, *large]
    limited = ["bash", "-c", 'ulimit -v 2600000; exec "$@"', "bash", *words]
    done = subprocess.run(limited, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    event = json.loads(done.stdout.splitlines()[-1])
    assert event["event"] == "error" and event["code"] == 2 and "Traceback" not in done.stderr
    # 151 M parameters: 16 bytes each.
    assert "1 rank needs 2.5 GB (master 0.6, moments 1.2, gradients 0.6, staging 0.0)" in event["message"]
    assert "GB free (address space limit, ulimit -v)" in event["message"]
    assert 'offload.optimizer = "disk"' in event["hint"]


@pytest.mark.parametrize(
    ("offload", "told"),
    [
        ({"optimizer": "disk", "folder": "x"}, "optimizer and master weights on disk, gradients on the host"),
        ({"optimizer": "host", "fraction": 0.5}, "50% of the elements: optimizer, master"),
        ({"optimizer": "host", "fraction": "auto", "device_mb": 80}, "what makes the rest fit into 80 MB: optimizer"),
        ({"optimizer": "host", "delayed_update": 3}, "updates a step late after the first 3"),
    ],
    ids=["disk", "fraction", "auto", "delayed"],
)
def test_the_sentence_of_each_option(offload: dict[str, object], told: str) -> None:
    assert told in what_is_offloaded(Config.load({"offload": offload, "zero": {"level": 2}}))


def printed(machines: list[MachineNeed], width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(host_memory(machines))
    return capture.get().splitlines()


def rank_of(elements: int) -> HostNeed:
    return need([(elements, HostWidths(gradient=4, down=4))] * 50, parameters="host", delayed=True, pins=True)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_host_memory_adds_up_and_fits(width: int) -> None:
    """Two machines, one of which has ranks that need different amounts."""
    first, second = rank_of(12_000_000), rank_of(6_000_000)
    machines = [
        MachineNeed(needs={0: first, 1: first, 2: first}, available=200_000_000_000, limit_name="memory available"),
        MachineNeed(needs={3: first, 4: second}, available=60_000_000_000, limit_name="memory available"),
    ]
    lines = printed(machines, width)
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines]
    assert "Host memory that offload takes, of what is free (memory available)" in lines[0]
    # 22 bytes an element, of it 8 for two gradients of a delayed update; 2 buffers of the largest bucket's 48 MB, for
    # which torch takes the next power of two.
    staging = 2 * 2**26
    assert first.total == 50 * 12_000_000 * 22 + staging and first.pinned == staging
    assert any(row[:4] == ["0", "each", "of", "0-2"] for row in rows)
    together = next(row for row in rows if row[:3] == ["0", "all", "3"])
    assert together[-6:] == ["40.0", "GB", "403", "MB", "200", "GB"]
    mixed = next(row for row in rows if row[:3] == ["1", "all", "2"])
    assert mixed[-6:] == ["20.0", "GB", "201", "MB", "60.0", "GB"]


def test_the_split_is_brief() -> None:
    split = {"compute": 1.234, "down": 0.05, "update": 0.21, "up": 0.0021, "hidden": 0.19}
    assert split_text(split) == "compute 1.23 s, down 50.0 ms, update 0.21 s, up 2.1 ms, 0.19 s of it hidden"
