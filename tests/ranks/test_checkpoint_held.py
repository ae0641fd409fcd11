"""What ranks hold in other ways than the usual shards, resumed where it is held in yet others (1e-5)."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3d
from tests import tiny
from tests.checkpoint_runs import batches, loss, made, resumed, saved, train
from tests.pipeline_runs import adamw, distance
from tests.world import run_ranks
from zero3d.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.ranks

Made = Callable[[], zero3d.Engine]


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def engine_of(kind: str, **options: Any) -> zero3d.Engine:
    torch.manual_seed(0)
    zero = {"level": options.pop("level", 3), "reduce": "step", "replicas": options.pop("replicas", 1)}
    offload = {"optimizer": options.pop("home", "device")}
    if offload["optimizer"] == "disk":
        offload["folder"] = tempfile.mkdtemp()  # Its files go with the run.
    config: dict[str, Any] = {"parallel": {"micro_batch": 2, **options}, "zero": zero, "offload": offload}
    if kind == "llama":  # One KV head, which tensor-parallel ranks hold alike.
        shape: Any = {"vocabulary": 61, "sequence_length": tiny.LENGTH, "width": 32, "layers": 2, "heads": 4}
        return zero3d.Engine(Llama(LlamaConfig(**shape, kv_heads=1, mlp_width=48)), loss, adamw, config)
    if kind == "adafactor":
        config["zero"]["whole_parameters"] = ["auto"]
        return zero3d.Engine(made(), loss, adafactor, config)
    return zero3d.Engine(made(), loss, {"momentum": momentum, "adamw": adamw}[kind], config)


OTHERS: dict[str, tuple[Made, list[tuple[int, Made]]]] = {
    "state of matrices, whole on one rank": (
        lambda: engine_of("adafactor"),
        [
            (4, lambda: engine_of("adafactor", level=0)),
            (1, lambda: engine_of("adafactor", level=1)),
            (2, lambda: engine_of("adafactor", level=2)),
        ],
    ),
    "groups that hold the same shards": (
        lambda: engine_of("adamw", replicas=2),
        [(4, lambda: engine_of("adamw", level=1)), (2, lambda: engine_of("adamw")), (1, lambda: engine_of("adamw"))],
    ),
    "heads that several ranks hold": (
        lambda: engine_of("llama", tp=4),
        [
            (4, lambda: engine_of("llama", tp=2, level=1)),
            (2, lambda: engine_of("llama", pp=2)),
            (1, lambda: engine_of("llama")),
        ],
    ),
    "optimizer state on the host": (
        lambda: engine_of("adamw", home="host", tp=2, level=2),
        [
            (4, lambda: engine_of("adamw", home="disk")),
            (2, lambda: engine_of("adamw", home="host", level=1)),
            (1, lambda: engine_of("adamw", level=1)),
        ],
    ),
    "optimizer state on the device": (
        lambda: engine_of("adamw", level=1),
        [(4, lambda: engine_of("adamw", home="host", pp=2)), (2, lambda: engine_of("adamw", home="disk", tp=2))],
    ),
    "another optimizer": (
        lambda: engine_of("momentum", tp=2, level=1),
        [(4, lambda: engine_of("momentum", replicas=2)), (2, lambda: engine_of("momentum", pp=2, level=0))],
    ),
}


def train_and_save(folder: Path, name: str) -> tuple[list[float], dict[str, Tensor]]:
    engine = OTHERS[name][0]()
    train(engine, batches()[:3])
    saved(engine, folder, step=3)
    return train(engine, batches()[3:]), engine.full_state_dict()


def go_on(folder: Path, name: str, which: int) -> tuple[list[float], dict[str, Tensor], set[str]]:
    engine = OTHERS[name][1][which][1]()
    resumed(engine, folder / "step-00000003")
    again = saved(engine, folder / f"again-{which}", step=3)
    return train(engine, batches()[3:]), engine.full_state_dict(), names_in(again)


def names_in(path: Path) -> set[str]:
    manifest = json.loads((path / "manifest.json").read_text())
    numbers = {f"{name} {key}" for name, of in manifest["numbers"].items() for key in of}
    return numbers | {f"{one['kind']} {one['name']} {one['key']}" for one in manifest["tensors"]}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_held_in_other_ways_is_resumed_in_others(tmp_path: Path, name: str) -> None:
    """And saved again there, it has the same names."""
    losses, weights = run_ranks(4, train_and_save, tmp_path, name)[0]
    for which, (world, _) in enumerate(OTHERS[name][1]):
        later, found, names = run_ranks(world, go_on, tmp_path, name, which)[0]
        torch.testing.assert_close(later, losses, rtol=1e-5, atol=0)
        assert names == names_in(tmp_path / "step-00000003")
        for key, value in weights.items():
            assert distance(found[key], value) <= 1e-5, key
