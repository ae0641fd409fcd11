"""A resumed run is the run that was not interrupted, bit by bit; and resuming reads what a rank will hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import tiny
from tests.checkpoint_runs import batches, loss, resumed, saved, train
from tests.pipeline_runs import adamw
from tests.world import run_ranks
from zero3d.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.ranks


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean() + output.mean()


def in_16_bits(folder: Path, precision: str) -> tuple[Any, Any]:
    """Dropout, warm-up, rounded weights, and a loss scale of its own."""
    shape: Any = {"vocabulary": 61, "sequence_length": tiny.LENGTH, "width": 32, "layers": 2, "heads": 4}
    options = {
        "run": {"steps": 20},
        "parallel": {"micro_batch": 2},
        "zero": {"level": 2},
        "precision": {"compute": precision},
        "optimizer": {"name": "adamw", "lr": 1e-2, "warmup": 8, "schedule": "cosine", "clip_norm": 0.5},
    }
    found = []
    for again in (False, True):
        torch.manual_seed(again)
        engine = zero3d.Engine(GPT(GPTConfig(**shape, dropout=0.1)), loss, config=options)
        data = [*batches(), *batches()]
        if again:
            resumed(engine, folder)
        else:
            train(engine, data[:5])
            engine._parts.scaler.scale *= 4.0 if precision == "fp16" else 1.0  # As if it had grown.
            saved(engine, folder, step=5)
        losses = train(engine, data[5:])
        masters = {info.name: engine.weight_of(info.name) for info in engine.parameters}
        scaler = engine._parts.scaler.state() if precision == "fp16" else None
        found.append((losses, masters, scaler, engine._parts.optimizer.learning_rate))
        engine.close()
    return found[0], found[1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_that_was_interrupted_is_the_same_run(tmp_path: Path, precision: str) -> None:
    for straight, again in run_ranks(2, in_16_bits, tmp_path, precision):
        assert straight[0] == again[0] and straight[2:] == again[2:]
        for name, master in straight[1].items():
            assert master.dtype == torch.float32 and torch.equal(master, again[1][name]), name


def larger(level: int) -> zero3d.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    return zero3d.Engine(model, squares, adamw, {"zero": {"level": level}, "parallel": {"micro_batch": 4}})


def save_larger(folder: Path, level: int) -> None:
    engine = larger(level)
    engine.step(torch.ones(4, 256))
    saved(engine, folder, step=1)


def bytes_read(folder: Path) -> tuple[int, int]:
    engine = larger(3)
    read = resumed(engine, folder).bytes_read
    shards = engine._parts.replica.shards
    return read, sum(3 * 4 * piece.numel for shard in shards for piece in shard.pieces)


@pytest.mark.parametrize(("world", "level"), [(4, 3), (4, 0), (2, 2), (1, 0)])
def test_a_rank_reads_what_it_will_hold(tmp_path: Path, world: int, level: int) -> None:
    """Within 10 %, whoever wrote it: 12.6 MB of weights and state over 4 ranks."""
    run_ranks(world, save_larger, tmp_path, level)
    for read, held in run_ranks(4, bytes_read, tmp_path):
        assert held <= read <= 1.1 * held
