"""`zero3d show checkpoint` and `zero3d export` as a user runs them, on what `zero3d train` left."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.command import fill, zero3d
from zero3d.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.cli


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two ranks at level 3: checkpoints of steps 2 and 4."""
    folder = fill(tmp_path_factory.mktemp("trained"))
    done = zero3d(folder, "train", "tiny.toml", "--set", "zero.level=3", "--set", "checkpoint.every=2")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(trained / "out", tmp_path / "out")
    return tmp_path


def shown(folder: Path, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    done = zero3d(folder, "show", "checkpoint", *words, "--json")
    assert done.returncode == code, done.stderr
    [line] = done.stdout.splitlines()
    return json.loads(line), done.stderr


def plain_model() -> GPT:
    return GPT(GPTConfig(vocabulary=256, sequence_length=32, width=32, layers=2, heads=2))


def test_a_run_becomes_files_that_the_plain_model_loads(trained: Path, tmp_path: Path) -> None:
    done = zero3d(trained, "export", "out", str(tmp_path / "hf"))
    assert done.returncode == 0 and not done.stderr
    assert "step-00000004" in done.stdout and "model.safetensors" in done.stdout and "float32" in done.stdout
    tensors, model = load_file(tmp_path / "hf" / "model.safetensors"), plain_model()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["head.weight"], []), "which is tied"
    words = ["--format", "torch", "--dtype", "bf16", "--json"]
    done = zero3d(trained, "export", "out/checkpoints/step-00000002", str(tmp_path / "torch"), *words)
    assert done.returncode == 0 and not done.stderr
    event = json.loads(done.stdout)
    assert (event["event"], event["step"], event["files"]) == ("done", 2, ["pytorch_model.bin"])
    state = torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True)
    plain_model().load_state_dict(state)
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert event["bytes"] == sum(value.nbytes for name, value in state.items() if name != "head.weight")
    assert not torch.equal(state["norm.weight"].float(), tensors["norm.weight"]), "of an earlier step"


def test_what_a_checkpoint_has_is_shown(trained: Path) -> None:
    for words in (["out"], ["out/checkpoints", "--verify"]):
        event, told = shown(trained, *words)
        assert (event["step"], event["whole"], event["why"], told) == (4, True, "", "")
        assert event["verified"] == ("--verify" in words)
    assert event["layout"] == {"dp": 2, "tp": 1, "pp": 1}
    assert len(event["files"]) == 2 and event["bytes"] == sum(event["files"].values())
    model = plain_model()
    assert {name: one["shape"] for name, one in event["tensors"].items()} == {
        name: list(parameter.shape) for name, parameter in model.named_parameters()
    }
    embedding = event["tensors"]["embedding.weight"]
    assert (embedding["dtype"], embedding["trainable"], embedding["ties"]) == ("float32", True, ["head.weight"])
    assert embedding["optimizer"]["exp_avg"] == {"shape": [256, 32], "dtype": "float32"}
    assert embedding["optimizer"]["step"] == 4
    done = zero3d(trained, "show", "checkpoint", "out/checkpoints/step-00000002")
    assert done.returncode == 0 and not done.stderr
    for words in ("step-00000002: whole", "step 2,", "saved by dp 2 x tp 1 x pp 1", "head.weight", "exp_avg_sq"):
        assert words in done.stdout
    assert re.search(r"blocks\.1\.mlp\.up\.weight +128 x 32 +float32", done.stdout)


def test_a_file_cut_short_is_told_and_the_one_before_it_taken(folder: Path) -> None:
    newest = folder / "out" / "checkpoints" / "step-00000004"
    file = newest / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    event, told = shown(folder, "out")
    assert (event["step"], event["whole"], told) == (2, True, "")
    assert "step-00000004" in event["skipped"][0] and file.name in event["skipped"][0]
    event, told = shown(folder, str(newest), code=2)
    assert (event["step"], event["whole"], event["tensors"]) == (4, False, {})
    assert file.name in event["why"] and file.name in told and "Take another" in told
    done = zero3d(folder, "export", "out", "hf")
    assert done.returncode == 0 and file.name in done.stderr and "step-00000002" in done.stdout
    done = zero3d(folder, "export", str(newest), "hf2", "--json")
    assert done.returncode == 2 and file.name in done.stderr
    assert json.loads(done.stdout)["code"] == 2 and not (folder / "hf2").exists()


def test_a_flipped_bit_is_found_by_verify_and_by_export(folder: Path) -> None:
    newest = folder / "out" / "checkpoints" / "step-00000004"
    file = newest / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-20_000] ^= 8
    data[len(data) // 8] ^= 8
    file.write_bytes(data)
    assert shown(folder, "out")[0]["whole"], "sizes are right"
    event, told = shown(folder, "out", "--verify", code=2)
    assert (event["step"], event["whole"]) == (4, False) and event["tensors"]
    assert file.name in event["why"] and "not what was written" in told
    done = zero3d(folder, "export", "out", "hf")
    assert done.returncode == 2 and file.name in done.stderr and "Take another checkpoint" in done.stderr
    assert not (folder / "hf").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["export", "none", "hf"], ["there are no checkpoints", "none", "Give the folder"]),
        (["export", "out/tokens", "hf"], ["no checkpoint is in this folder", "out/tokens", "Give one that holds some"]),
        (["export", "out/config.toml", "hf"], ["there are no checkpoints", "out/config.toml"]),
        (["export", "out", "out"], ["not empty", "out", "Name a new one"]),
        (["export", "out", "hf", "--dtype", "int4"], ["--dtype int4", "fp32, bf16, fp16"]),
        (["export", "out", "hf", "--format", "gguf"], ["--format gguf", "safetensors, torch"]),
        (["export", "out", "hf", "--max-shard-size", "5"], ["--max-shard-size 5", "5GB"]),
        (["show", "checkpoint", "none"], ["there are no checkpoints", "none", "Give the folder"]),
        (
            ["show", "checkpoint", "out/tokens"],
            ["no checkpoint is in this folder", "out/tokens", "Give one that holds some"],
        ),
    ],
)
def test_what_cannot_be_done_leaves_with_2(trained: Path, words: list[str], told: list[str]) -> None:
    done = zero3d(trained, *words)
    assert done.returncode == 2 and not done.stdout
    assert all(text in done.stderr for text in told), done.stderr
    assert "Traceback" not in done.stderr and not (trained / "hf").exists()
