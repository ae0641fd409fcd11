"""Checkpoints that were once saved where nobody looked, or loaded as what they are not: each has its story."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3d
from tests.world import run_ranks
from zero3d.checkpoint import folders

DATA = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
}


def made(optimizer: str = "adamw", **config: Any) -> zero3d.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    options = {"zero": {"level": 2}, **config}
    return zero3d.Engine(model, lambda y, x: (y - x).square().mean(), OPTIMIZERS[optimizer], options)


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except zero3d.UsageError as error:
        return f"{error.message} {error.hint}"
    return ""


def others(folder: Path, home: str) -> dict[str, Any]:
    """What each optimizer makes of the checkpoint of another: refused, and then allowed, on two ranks."""
    found: dict[str, Any] = {}
    config = {} if home == "device" else {"offload": {"optimizer": home}}
    for name in OPTIMIZERS:
        engine = made(name)
        engine.step(DATA)
        engine.save(folder / name)
        engine.close()
    for name in ("momentum", "adamw", "amsgrad"):
        for other in OPTIMIZERS:
            engine = made(other, **config)
            told = raised(lambda: engine.load(folder / name))  # noqa: B023
            loaded = engine.load(folder / name, allow_missing=True)
            engine.step(DATA)
            found[f"{name} {other}"] = (told, tuple(loaded.missing), tuple(loaded.unexpected), loaded.moments)
            engine.save(folder / f"{name}-{other}")
            engine.close()
    return found


@pytest.mark.parametrize("home", ["device", "host"])
def test_state_of_another_optimizer_is_refused_or_left_out(tmp_path: Path, home: str) -> None:
    """It was loaded, and the next step ended with a KeyError of torch's, or began anew without a word."""
    found, same = run_ranks(2, others, tmp_path, home)
    assert found == same
    for pair, (told, missing, unexpected, moments) in found.items():
        name, other = pair.split()
        if name == other:
            assert (told, missing, unexpected) == ("", (), ()) and moments, pair
        else:
            assert "with the same optimizer" in told and unexpected + missing, pair
    assert "exp_avg of 0.weight" in found["momentum adamw"][1] and found["momentum adamw"][3] == 0
    assert "momentum_buffer of 0.weight" in found["momentum plain"][2]
    assert found["amsgrad adamw"][1] == () and found["amsgrad adamw"][3] == 8  # All that AdamW keeps is there.
    manifest = folders.newest(tmp_path / "amsgrad-adamw").manifest
    assert {entry.key for entry in manifest.tensors if entry.kind == "state"} == {"exp_avg", "exp_avg_sq"}


def odd_places(folder: Path) -> list[str]:
    engine = made()
    engine.step(DATA)
    named = folder / "step-00000500"
    engine.save(named)
    told = [str(engine.load(named).step)]
    wrong: Any = None
    told += [raised(lambda: engine.save(wrong)), raised(lambda: engine.load("")), raised(lambda: engine.export(wrong))]
    told.append(raised(lambda: engine.save(wrong if engine.rank else folder)))
    told.append(raised(lambda: engine.export("s3://bucket/run")))
    wrong = [1]
    told.append(raised(lambda: engine.save(folder, extra=wrong, background=True)))
    told.append(raised(lambda: engine.save(folder, extra={"rate": torch.ones(1)}, background=True)))
    for call in (lambda: engine.load(named), lambda: engine.export(folder / "out")):
        with engine.gathered(write=True):
            told.append(raised(call))
    return told


def test_places_and_extras_are_looked_at_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing went into folders "None" and "s3:"; a folder that has the name of a checkpoint could be saved in and not
    loaded from; `extra` was looked at when all was written; what was loaded while weights were changed was lost."""
    monkeypatch.chdir(tmp_path)
    told, same = run_ranks(2, odd_places, tmp_path)
    assert told == same
    assert told[0] == "1"
    assert all("Give a path, or a URL" in one for one in told[1:5])
    assert "this machine" in told[5] and "Give a dict" in told[6] and "extra cannot be saved" in told[7]
    assert "engine.load inside" in told[8] and "engine.export inside" in told[9]
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000500"]


def test_what_a_run_could_not_use_is_no_reason_to_remove_what_it_saves(tmp_path: Path) -> None:
    """A checkpoint whose elements are damaged looks whole: a run that went on from the one before removed its own new
    ones in favour of that."""
    run_ranks(1, some, tmp_path)
    [removed] = run_ranks(1, kept, tmp_path)
    assert removed == ["step-00000001"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]
    shutil.rmtree(tmp_path / "step-00000004")
    assert folders.newest(tmp_path).manifest.step == 2


def some(folder: Path) -> None:
    engine = made()
    for step in range(1, 5):
        engine.step(DATA)
        if step in (1, 2, 4):
            engine.save(folder)


def kept(folder: Path) -> list[str]:
    return [one.name for one in folders.keep(folder, last=1, newest="step-00000002")]
