"""Weights & Biases with a module that stands in for it, and refused where it is not installed."""

import importlib
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zero3d.config import Config
from zero3d.errors import ConfigError
from zero3d.mfu import flops_per_token, peak_flops
from zero3d.reports import StepReport
from zero3d.stopping import Stopped
from zero3d.wandb_records import WeightsAndBiases, check_wandb
from zero3d.watching.notice import Notice
from zero3d.watching.watch import RanksReport


class StandIn(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.said: list[tuple[str, Any]] = []
        self.summary: dict[str, Any] = {}

    def init(self, **options: Any) -> "StandIn":
        self.said.append(("init", options))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.said.append(("log", (step, values)))

    def alert(self, title: str, text: str) -> None:
        self.said.append(("alert", (title, text)))

    def finish(self, exit_code: int) -> None:
        self.said.append(("finish", exit_code))


def test_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", there)
    config = Config.load({"run": {"wandb": "mine", "name": "one"}})
    check_wandb(config)
    listener = WeightsAndBiases("mine", tmp_path / "out")
    listener.started(SimpleNamespace(config=config, world=2, parameters=10))  # type: ignore[arg-type]
    report = StepReport(
        step=3, loss=2.0, tokens=10, grad_norm=1.0, clip_coefficient=1.0, lr=0.1, skipped=False, seconds=0.5,
        loss_scale=1.0, mfu=0.4,
    )  # fmt: skip
    listener.stepped(report)
    listener.noticed(Notice(step=3, kind="loss-spike", message="the loss has jumped"))
    listener.compared(RanksReport(step=3, busy=[0.1, 0.2], memory=[5, 6], waited={}, sent={"dp": 7}))
    listener.stopped(Stopped(step=3, steps=9, signal="SIGTERM", checkpoint=tmp_path))
    listener.close()
    kinds = [kind for kind, _ in there.said]
    assert kinds == ["init", "log", "alert", "log", "finish"]
    assert there.said[0][1]["project"] == "mine" and there.said[0][1]["name"] == "one"
    step, values = there.said[1][1]
    assert step == 3 and values["train/loss"] == 2.0 and values["train/tokens_per_second"] == 20
    assert values["train/mfu"] == 0.4
    assert there.said[3][1][1] == {
        "ranks/busy_seconds_0": 0.1, "ranks/busy_seconds_1": 0.2, "ranks/memory_bytes_0": 5, "ranks/memory_bytes_1": 6,
        "sent_bytes/dp": 7,
    }  # fmt: skip
    assert there.said[-1] == ("finish", 0) and "SIGTERM" in there.summary["stopped"]


def test_a_project_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_wandb(Config.load({"run": {"wandb": "mine"}}))
    check_wandb(Config.load({}))


def test_what_the_utilisation_counts() -> None:
    """6 FLOPs a parameter and token, 12 layers x width x length for attention; peaks of known chips alone."""
    config = Config.load({"model": {"layers": 2, "width": 8, "heads": 2}, "data": {"sequence_length": 4}})
    assert flops_per_token(config, 1000) == 6000 + 12 * 2 * 8 * 4
    assert peak_flops("NVIDIA H200", "bf16") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", "fp32") == 19.5e12
    assert peak_flops("Some CPU", "fp32") is None
