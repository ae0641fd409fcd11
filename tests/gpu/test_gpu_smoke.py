"""Levels 0 to 3 on a GPU: the same bits, on one rank, over NCCL with one rank, and as a preset is trained."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

import zero3d
from tests.gpu.runs import ALL_ON_HOST, HOST, config, over_a_group_of_one, same, trained
from zero3d.models.losses import next_token_loss
from zero3d.models.presets import build_function


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_levels_have_the_same_bits(compute: str) -> None:
    """AdamW, clipped: norms too."""
    clipped = {"optimizer": {"lr": 1e-3, "clip_norm": 0.5}}
    first = trained(config(0, compute, **clipped), "adamw")
    for level in (1, 2, 3):
        found = trained(config(level, compute, **clipped), "adamw")
        assert same(found, first) and found.norms == first.norms, level
    assert first.losses[-1] < first.losses[0]


@pytest.mark.parametrize(
    ("level", "offload"),
    [(0, {}), (1, {}), (2, {}), (3, {}), (2, HOST), (3, ALL_ON_HOST), (2, {**HOST, "delayed_update": 1})],
)
def test_the_preset_learns_a_batch_by_heart(level: int, offload: dict[str, Any]) -> None:
    """bf16, blocks recomputed. Steps leave as much memory in use as the one before; with offload at most a second
    buffer of each make-up comes when a copy takes long for the first time."""
    build = build_function(zero3d.config.Model(width=64, layers=3, heads=2), 64, 32)
    engine = zero3d.Engine(
        build,
        next_token_loss,
        config={
            "zero": {"level": level, "bucket_mb": 0.1},
            "precision": {"compute": "bf16"},
            "recompute": {"mode": "block"},
            "optimizer": {"lr": 1e-2},
            "offload": offload,
        },
    )
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    losses, used = [], []
    for _ in range(20):
        losses.append(engine.step(batch).loss)
        engine.full_state_dict()  # waits for all that goes on
        used.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    engine.close()
    assert losses[-1] < losses[0] / 2
    assert max(used[3:]) - min(used[3:]) <= (1e6 if offload else 0), used


def test_over_nccl_one_rank_has_the_same_bits_as_without(tmp_path: Path) -> None:
    """All collectives are made, and their buffers belong to NCCL's stream until they are waited for."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert not pool.apply(over_a_group_of_one, ("nccl", str(tmp_path / "store")))
