"""The small run that tests/faults.py disturbs: its model, which can do wrong by itself, its losses, its checkpoints."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from tests.command import fill
from zero3d.checkpoint.folders import whole
from zero3d.checkpoint.place import NAME
from zero3d.checkpoint.rebuild import Rebuilder
from zero3d.errors import DataError

INSIDE = ("skip", "nan", "blip")
"""What rank 1's model does."""
MODEL = """
import os
import torch
from torch import nn


class Block(nn.Linear):
    def forward(self, x):
        at, self.calls = self.calls, self.calls + self.training
        mine = self.number >= NUMBER if FAULT == "skip" else self.number == NUMBER
        fault = FAULT if self.training and int(os.environ["RANK"]) == 1 and mine else ""
        if fault == "skip" and at == AT:
            return x
        y = x + super().forward(x).tanh()
        wrong = (fault == "nan" and at >= AT) or (fault == "blip" and at == AT)
        return y * float("nan") if wrong else y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Embedding(256, 32), nn.Linear(32, 256)
        self.blocks = nn.ModuleList(Block(32, 32) for _ in range(3))
        for number, block in enumerate(self.blocks):
            block.number, block.calls = number, 0

    def forward(self, tokens):
        x = self.enter(tokens)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


build = Net
"""


def fill_with_model(folder: Path, fault: str = "", step: int = 0, number: int = 0) -> Path:
    """A folder to train in, with a model that does `fault` after `step` steps, in block `number` (or from there on)."""
    folder.mkdir(exist_ok=True)
    if not (folder / "tiny.toml").exists():
        fill(folder)
    (folder / "faulty.py").write_text(f"FAULT, AT, NUMBER = {fault!r}, {step}, {number}\n{MODEL}")
    return folder


def losses(folder: Path) -> dict[int, float]:
    """Of the steps told so far."""
    return dict(_told(folder / "out/metrics.jsonl"))


def _told(path: Path) -> Iterator[tuple[int, float]]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # being written
            continue
        if event["event"] == "step":
            yield event["step"], event["loss"]


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    place = folder / "out/checkpoints"
    return place.exists() and any(".tmp" in name for name in os.listdir(place))


def troubles(folder: Path) -> list[str]:
    """What is wrong with the checkpoints that have their own names, read to the last byte."""
    found = []
    for path in sorted(folder.glob("step-*")) if folder.exists() else []:
        if NAME.fullmatch(path.name) is None:
            continue
        try:
            _, manifest = whole(path)
            with Rebuilder(path, manifest) as rebuilder:
                rebuilder.verify(lambda *_: None)
        except DataError as error:
            found.append(f"{path.name}: {error.message}")
    return found
