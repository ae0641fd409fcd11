"""A loop of one's own, with its clipping, optimizer and scheduler, on a sharded model.

One rank:   python examples/own_loop.py
Two ranks:  torchrun --nproc-per-node 2 examples/own_loop.py [--level 2]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import zero3d

STEPS = 200
GLOBAL_BATCH = 64


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 64), nn.Sequential(*blocks), nn.Linear(64, 4))


def data(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    """Four groups of four numbers; the answer is the group with the largest sum of squares."""
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))
    return x, x.view(samples, 4, 4).square().sum(-1).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # these tensors are too small to be shared by threads

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    sharded = zero3d.shard(model, optimizer, level=asked.level)  # the only new line before the loop

    for step in range(1, STEPS + 1):
        x, y = (part.chunk(sharded.world)[sharded.rank] for part in data(step, GLOBAL_BATCH))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = sharded.clip_grad_norm_(1.0)  # no rank has the whole gradient, so this is asked of `sharded`
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if sharded.rank == 0 and step % 40 == 0:
            print(f"step {step:3}  loss of rank 0 {loss:.4f}  gradient norm of all {norm:.4f}")

    x, y = data(1_000_000, 1000)
    with sharded.gathered() as whole, torch.no_grad():
        right = (whole(x).argmax(-1) == y).float().mean()
    if sharded.rank == 0:
        print(f"{right:.1%} right")


if __name__ == "__main__":
    main()
