"""The command with pipeline stages: trains, verifies, says what ranks hold and send, refuses before ranks start."""

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import zero3d
from tests import tiny
from tests.command import ZERO3D, fill
from tests.command import zero3d as command
from tests.world import run_ranks
from zero3d.cli import checks
from zero3d.config import Config
from zero3d.errors import ConfigError
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.losses import next_token_loss
from zero3d.planner import bubble
from zero3d.planner.reduction import Part, step_bytes

STAGES = ("--set", "parallel.pp=2", "--set", "parallel.dp=auto", "--set", "parallel.micro_batch=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.cli
def test_it_trains_over_three_axes_and_says_what_is_held_and_sent(folder: Path) -> None:
    done = command(
        folder, "train", "tiny.toml", "-n", "4", *STAGES, "--set", "parallel.tp=2", "--set", "model.tied=false"
    )
    assert done.returncode == 0, done.stderr
    *steps, last = records(folder)
    assert [step["tokens"] for step in steps] == [4 * 32] * 4, "every sample counts once"
    assert list(last["sent_bytes"]) == ["tp", "pp"] and min(map(min, last["sent_bytes"].values())) > 0
    words = " ".join(done.stdout.split())
    assert "dp 1 x tp 2 x pp 2, on cpu" in words and "sent over tp" in words and "sent over pp" in words
    assert "2 stages: pp 0 L0; pp 1 L1 │ │ 1f1b of 4 micro-batches, bubble 25.0% (simulated)" in words
    # One block and the embedding on the first stage, one block, a norm and the head on the last, each cut in two.
    block = 12 * 32 * 32 // 2 + 2 * 32
    numel = [block + 256 * 16, block + 256 * 16 + 32]
    padded = [4 * (one + 32 * norms) for one, norms in zip(numel, (2, 3))]  # Slots are multiples of 64 elements.
    assert last["held_bytes"]["weights"] == [padded[0]] * 2 + [padded[1]] * 2
    for pp, one in enumerate(numel):
        assert f"predicted, pp {pp} {4 * one / 1e3:.1f} kB" in words


@pytest.mark.cli
def test_it_is_the_same_training_with_another_preset_and_schedule(folder: Path) -> None:
    keys = (
        "model.preset=llama",
        "model.layers=4",
        "parallel.schedule=zbv",
        "parallel.stages_per_rank=2",
        "zero.level=3",
    )
    sets = [word for key in keys for word in ("--set", key)]
    done = command(folder, "verify", "tiny.toml", "-n", "2", *STAGES, *sets, "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dp 1 x pp 2, ZeRO level 3, and one plain process agree within 1e-05 over 2 steps" in done.stdout


@pytest.mark.cli
def test_torchrun_starts_it_too_and_few_micro_batches_are_a_note(folder: Path) -> None:
    torchrun = [ZERO3D[0], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sets = [*STAGES[:4], "--set", "parallel.micro_batch=4", "--set", "run.steps=2", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "-m", "zero3d", "train", "tiny.toml", *sets],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    note, *_, last = map(json.loads, done.stdout.splitlines())
    assert last["event"] == "done" and list(last["sent_bytes"]) == ["pp"]
    assert "1 micro-batch on pp = 2 with 1f1b: a step takes 100% longer" in note["message"]
    assert "With parallel.micro_batch = 2 there are 2, and it takes 50% longer" in note["message"]


OWN = "F0 F1 B0 B1\nF0 B0 F1 B1\n"
REFUSED = {
    "unknown": (["parallel.schedule=1f2b"], "there is no schedule '1f2b'.*Did you mean 1f1b"),
    "file": (["parallel.schedule=none.txt"], "cannot read none.txt"),
    "too few": (["parallel.schedule=zbv"], "pp = 2, stages_per_rank = 1.*Set parallel.stages_per_rank = 2"),
    "too many": (
        ["parallel.stages_per_rank=2"],
        'stages_per_rank = 2.*Set parallel.stages_per_rank = 1 or parallel.schedule = "interleaved"',
    ),
    "own": (
        ["parallel.schedule=own.txt"],
        "not for 2 stages, 2 ranks and 4 micro-batches.*2 ranks and 2 micro-batches",
    ),
    "number": (["parallel.stage_blocks=[1, 1, 1]"], "is for 3 stages, and there are 2.*Give each stage"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_schedules_that_do_not_fit_are_refused_without_torch(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "own.txt").write_text(OWN)
    settings, told = REFUSED[case]
    config = Config.load("tiny.toml", ["parallel.pp=2", "parallel.dp=auto", "parallel.micro_batch=1", *settings])
    with pytest.raises(ConfigError) as found:
        checks.check_ranks(config, 2)
    assert re.search(told, str(found.value), re.DOTALL), found.value


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["parallel.pp=4"], "4 stages need at least 4 blocks, and the model has 2\nUse at most 2 stages"),
        (["parallel.pp=2", "parallel.stage_blocks=[2, 1]"], "3 blocks, and the model has 2\nSuch as"),
    ],
)
def test_models_that_cannot_be_cut_so_are_refused(
    settings: list[str], told: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = Config.load("tiny.toml", ["parallel.dp=auto", *settings])
    prepared = checks.prepare_data(config, None)
    with pytest.raises(ConfigError, match=told):
        checks.check_model(config, prepared, 4, allow_code=False)


@pytest.mark.cli
def test_ranks_that_axes_do_not_divide_leave_with_2(folder: Path) -> None:
    done = command(folder, "train", "tiny.toml", "-n", "6", *STAGES, "--set", "parallel.tp=2")
    assert done.returncode == 2 and "6 ranks cannot be shared by parallel.tp x parallel.pp = 2 x 2" in done.stderr
    assert "Start 4 or 8 ranks" in done.stderr and not (folder / "out").exists()


def sent(cases: list[tuple[int, str, str]]) -> list[dict[str, float]]:
    """What a step sent over dp, and what the planner said of it, at pp 2 x dp 2; 6 samples."""
    found = []
    for level, reduce, schedule in cases:
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocabulary=256, sequence_length=8, width=64, layers=4, heads=4, tied=False))
        options: dict[str, Any] = {
            "zero": {"level": level, "reduce": reduce},
            "data": {"global_batch": 6},
            "parallel": {"dp": 2, "pp": 2, "micro_batch": 1, "schedule": schedule},
        }
        engine = zero3d.Engine(model, next_token_loss, tiny.adamw, options)
        tokens = torch.randint(0, 256, (3, 9))
        for _ in range(2):
            engine.step({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        parts = engine._parts
        counted: Counter[str] = Counter()
        for call in parts.axis.calls:
            counted["weights" if call.label.startswith("weights") else "reduced"] += call.sent_bytes
        pp = parts.pipeline.stages.holders[parts.pipeline.stages.mine[0]]
        mine = [info for info in engine.parameters if pp in engine.stages.ranks_of(info.name)]
        outside = sum(info.numel for info in mine if not info.name.startswith("blocks."))
        part = Part(trained=sum(info.numel for info in mine), frozen=0, outside=outside)
        said = step_bytes(engine.config, part, bubble.actions(engine.config)[pp])
        held = engine.held_bytes()["gradients"][engine.rank]
        numbers = {"reduced": counted["reduced"], "weights": counted["weights"], "held": held}
        found.append(numbers | {f"said {name}": getattr(said, name) for name in ("reduced", "weights", "held")})
        engine.close()
    return found


@pytest.mark.ranks
def test_the_plan_says_what_each_choice_of_reduce_holds_and_sends() -> None:
    """Within the padding of buckets and the few numbers that ranks agree on at the end of a step."""
    cases = [(level, reduce, "1f1b") for level in range(4) for reduce in ("step", "micro-batch")]
    cases.append((3, "micro-batch", "zbh1"))
    for rank in run_ranks(4, sent, cases, timeout=120):
        for case, numbers in zip(cases, rank, strict=True):
            for what in ("reduced", "weights", "held"):
                assert numbers[what] == pytest.approx(numbers[f"said {what}"], rel=0.005), (case, what)
