"""The command with tensor parallelism: trains, verifies, says what each rank holds, refuses before ranks start."""

import json
from pathlib import Path

import pytest

from tests.command import fill, zero3d
from zero3d.cli import checks
from zero3d.config import Config
from zero3d.errors import ConfigError

pytestmark = pytest.mark.cli

CUT = ("-n", "2", "--set", "parallel.tp=2", "--set", "parallel.dp=1")
LLAMA = ("--set", "model.preset=llama", "--set", "model.kv_heads=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


def test_it_trains_and_says_what_ranks_hold_of_the_cut_model(folder: Path) -> None:
    more = ("--set", "parallel.sequence_parallel=true", "--set", "run.check_every=2")
    done = zero3d(folder, "train", "tiny.toml", *CUT, *more)
    assert done.returncode == 0, done.stderr
    *steps, last = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    assert [step["tokens"] for step in steps] == [4 * 32] * 4, "both ranks have the same samples"
    assert list(last["sent_bytes"]) == ["tp"] and min(last["sent_bytes"]["tp"]) > 0
    # What is cut, halved, and five norms of 32; buckets round up to 64 elements a parameter.
    numel = (256 * 32 + 2 * 12 * 32 * 32) // 2 + 5 * 32
    assert last["held_bytes"]["weights"] == [4 * (numel + 5 * 32)] * 2
    words = " ".join(done.stdout.split())
    assert "4 samples = dp 1 x 4" in words and "dp 1 x tp 2 x pp 1, on cpu, sequence parallel" in words
    assert "sent over tp" in words and f"0 0 all {4 * numel / 1e3:.1f} kB all" in words
    assert "--set parallel.dp=2 --set run.out=out-4ranks" in words, "twice the ranks is twice dp"


def test_it_is_the_same_training_with_grouped_heads_too(folder: Path) -> None:
    done = zero3d(folder, "verify", "tiny.toml", *CUT, *LLAMA, "--steps", "2", "--set", "zero.level=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Close: dp 1 x tp 2, ZeRO level 3, and one plain process agree within 1e-05 over 2 steps" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-n", "4", "--set", "parallel.tp=4", "--set", "parallel.dp=1"], "2 heads of 48 do not divide over 4 ranks"),
        (["-n", "3", "--set", "parallel.tp=2", "--set", "parallel.dp=auto"], "Start 2 or 4 ranks"),
    ],
    ids=["heads", "ranks"],
)
def test_what_cannot_be_cut_is_refused_before_ranks_start(folder: Path, words: list[str], told: str) -> None:
    done = zero3d(folder, "train", "tiny.toml", *words)
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (folder / "out" / "metrics.jsonl").exists()


def test_what_is_updated_whole_and_cut_is_refused_before_ranks_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    keys = ("parallel.tp=2", "parallel.dp=1", "optimizer.name=adafactor", 'zero.whole_parameters=["auto"]')
    config = Config.load("tiny.toml", keys)
    prepared = checks.prepare_data(config, None)
    with pytest.raises(ConfigError, match=r"embedding\.weight is cut over 2 tensor-parallel ranks"):
        checks.check_model(config, prepared, 2, allow_code=False)
