"""Promise 2: weights depend on the seed and their names alone, and are made without room for the whole model."""

import gc
import threading

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests.world import run_ranks
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.losses import next_token_loss

pytestmark = pytest.mark.ranks


def start(level: int, seed: int, precision: str) -> dict[str, Tensor]:
    torch.manual_seed(1000 + torch.distributed.get_rank() if torch.distributed.is_initialized() else 7)
    config = GPTConfig(vocabulary=64, sequence_length=16, width=32, layers=3, heads=2)
    engine = zero3d.Engine(
        lambda: GPT(config),
        next_token_loss,
        config={"zero": {"level": level}, "run": {"seed": seed}, "precision": {"compute": precision}},
    )
    return engine.full_state_dict()


def test_every_layout_starts_from_the_same_weights() -> None:
    [plain] = run_ranks(1, start, 0, 3, "fp32")
    assert len({float(value.float().sum()) for name, value in plain.items() if "norm" not in name}) > 10
    for ranks in (1, 2, 4):
        for level in (0, 1, 2, 3):
            for found in run_ranks(ranks, start, level, 3, "bf16"):
                assert found.keys() == plain.keys()
                assert all(torch.equal(value, plain[name]) for name, value in found.items())
    [other] = run_ranks(1, start, 0, 4, "fp32")
    assert not torch.equal(other["embedding.weight"], plain["embedding.weight"])


WIDTH, LAYERS = 1024, 24
BLOCK_BYTES = 4 * 2 * WIDTH * WIDTH


class Wide(nn.Module):
    """200 MB in 24 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def own_memory() -> int:
    """Bytes of this process's own pages: libraries, which count when they are first touched, are not among them."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """Looks every millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.001):
            self.most = max(self.most, own_memory())


def build(level: int) -> tuple[int, int]:
    """(what building took at most beyond this rank's weights, those weights), in bytes. Gradients and optimizer
    state have no memory before the first step."""
    gc.collect()
    before = own_memory()
    peak = Peak()
    peak.start()
    engine = zero3d.Engine(Wide, lambda out, batch: (out.sum(), 1), config={"zero": {"level": level}})
    peak.over.set()
    peak.join()
    weights = engine.held_bytes()["weights"][engine.rank]
    return peak.most - before - weights, weights


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_holds_the_whole_model_while_it_is_built(ranks: int) -> None:
    model = BLOCK_BYTES * LAYERS
    for extra, weights in run_ranks(ranks, build, 3):
        assert weights < 1.01 * model / ranks
        assert extra < 4 * BLOCK_BYTES < model / 5
