"""`zero3d show checkpoint` and `zero3d export` of checkpoints at URLs, and what the guide says of weights alone."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import zero3d
from tests.world import run_ranks
from zero3d.cli.main import app

GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "checkpoints.md"
RUN = "memory://bucket/run"


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def engine_of(model: Any, **config: Any) -> zero3d.Engine:
    return zero3d.Engine(model, loss, "adamw", {"parallel": {"micro_batch": 2}, **config})


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[dict[str, Tensor]]:
    """Checkpoints of steps 1 and 2 at `RUN`, and the weights of the second; the memory of fsspec is this process'."""
    [state] = run_ranks(1, save_two, tmp_path)
    fs = MemoryFileSystem()
    fs.put(f"{tmp_path}/checkpoints", "/bucket/run/checkpoints", recursive=True)
    yield state
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def save_two(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = engine_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    for _ in range(2):
        engine.step(torch.ones(2, 8))
        engine.save((folder / "checkpoints").as_uri())
    return engine.full_state_dict()


def called(*words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout), done.stderr


def test_what_is_at_a_url_is_shown_and_exported(tmp_path: Path, remote: dict[str, Tensor]) -> None:
    urls = (RUN, f"{RUN}/", f"{RUN}/checkpoints", f"{RUN}/checkpoints/step-00000002", tmp_path.as_uri(), str(tmp_path))
    for number, url in enumerate(urls):
        event, _ = called("show", "checkpoint", url, "--verify")
        assert (event["step"], event["whole"], event["verified"]) == (2, True, True)
        assert event["checkpoint"].endswith("run/checkpoints/step-00000002" if number < 4 else "step-00000002")
        event, _ = called("export", url, str(tmp_path / f"out-{number}"))
        assert (event["step"], event["files"]) == (2, ["model.safetensors"])
        found = load_file(tmp_path / f"out-{number}" / "model.safetensors")
        assert found.keys() == remote.keys() and all(torch.equal(found[name], remote[name]) for name in found)


def test_one_that_is_damaged_at_a_url_gives_way(tmp_path: Path, remote: dict[str, Tensor]) -> None:
    fs, file = MemoryFileSystem(), "/bucket/run/checkpoints/step-00000002/rank-00000.safetensors"
    data = bytearray(fs.cat_file(file))
    data[-100] ^= 1
    fs.pipe_file(file, bytes(data))
    event, told = called("show", "checkpoint", RUN, "--verify", code=2)
    assert (event["step"], event["whole"]) == (2, False) and "rank-00000.safetensors" in event["why"] in told
    event, told = called("export", RUN, str(tmp_path / "out"), code=2)
    assert event["event"] == "error" and "rank-00000" in told and not (tmp_path / "out").exists()
    fs.pipe_file(file, bytes(data[:-100]))
    event, told = called("show", "checkpoint", RUN)
    assert (event["step"], event["whole"]) == (1, True) and "step-00000002" in event["skipped"][0]
    event, told = called("export", RUN, str(tmp_path / "out"))
    assert event["step"] == 1 and "step-00000002" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "checkpoint", "memory://none"], ["memory://none", "no checkpoints"]),
        (["export", "memory://none", "out"], ["memory://none", "no checkpoints"]),
        (["export", "nothing://run", "out"], ["nothing://run", "fsspec"]),
        (["export", "file://run", "out"], ["file://run", "whole path"]),
        (["export", RUN, "memory://out"], ["memory://out", "folder of this machine"]),
    ],
)
def test_what_no_url_can_be_is_refused(remote: object, words: list[str], told: list[str]) -> None:
    event, text = called(*words, code=2)
    assert event["code"] == 2 and all(one in text for one in told) and "Traceback" not in text


def blocks_of_the_guide() -> list[str]:
    section = GUIDE.read_text(encoding="utf-8").partition("## Weights alone\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def run_the_guide(folder: Path, level: int) -> tuple[dict[str, Tensor], ...]:
    """-> what was trained; what a new engine of another level begins with; what an old one that is given it has."""
    os.chdir(folder)
    torch.manual_seed(0)
    engine, (write, begin) = engine_of(Net, zero={"level": level}), blocks_of_the_guide()
    engine.step(torch.ones(2, 8))
    exec(write, {"engine": engine, "torch": torch})
    torch.distributed.barrier()
    config = {"zero": {"level": 3 - level}}
    names: dict[str, Any] = {"torch": torch, "zero3d": zero3d, "Net": Net, "loss": loss, "config": config}
    exec(begin, names)
    other = engine_of(Net, run={"seed": 1})
    other.load_state_dict(engine.full_state_dict())
    return engine.full_state_dict(), names["engine"].full_state_dict(), other.full_state_dict()


@pytest.mark.parametrize("level", [0, 3])
def test_the_guides_weights_alone_are_what_it_says(tmp_path: Path, level: int) -> None:
    """Bit by bit, into another level and by either way."""
    for trained, new, given in run_ranks(2, run_the_guide, tmp_path, level):
        assert trained.keys() == new.keys() == given.keys() == Net().state_dict().keys()
        assert all(torch.equal(value, new[name]) and torch.equal(value, given[name]) for name, value in trained.items())
    written = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(value, trained[name]) for name, value in written.items())
