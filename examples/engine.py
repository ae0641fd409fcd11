"""A model of one's own at ZeRO level 3. However many ranks it runs on, the losses are the same.

One rank:   python examples/engine.py
Two ranks:  torchrun --nproc-per-node 2 examples/engine.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero3d


class Block(nn.Module):
    """[B, width] -> [B, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Sequential(*(Block(64) for _ in range(4))), nn.Linear(64, 4))


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """The sum over all samples, and their number: zero3d divides by what all ranks together counted."""
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def data(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    """Four groups of four numbers; the answer is the group with the largest sum of squares."""
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))
    return x, x.view(samples, 4, 4).square().sum(-1).argmax(-1)


def main() -> None:
    torch.set_num_threads(1)  # these tensors are too small to be shared by threads
    config = {"run": {"steps": 200}, "zero": {"level": 3}, "optimizer": {"lr": 5e-3, "schedule": "cosine"}}
    engine = zero3d.Engine(build, loss, "adamw", config)
    for step in range(200):
        x, y = data(seed=step, samples=64)
        report = engine.step((x.chunk(engine.dp_size)[engine.dp_index], y.chunk(engine.dp_size)[engine.dp_index]))
        if engine.rank == 0 and report.step % 40 == 0:
            print(f"step {report.step:3}  loss {report.loss:.4f}  gradient norm {report.grad_norm:.4f}")
    x, y = data(seed=1_000_000, samples=1000)
    with engine.gathered() as model:  # plain torch inside: whole weights, on every rank
        right = (model(x).argmax(-1) == y).float().mean()
    held = engine.held_bytes()  # collective, as all that asks other ranks: called on every one
    if engine.rank == 0:
        print(f"{right:.1%} right; each rank held weights {held['weights']} and optimizer {held['optimizer']} bytes")
    engine.close()


if __name__ == "__main__":
    main()
