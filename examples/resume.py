"""Saves on one layout and goes on with another: the losses are those of a run that was never interrupted.

    torchrun --nproc-per-node 2 examples/resume.py --level 3 --until 60     # begins, and saves at step 60
    python examples/resume.py --level 1 --until 120                         # goes on, on one rank
    torchrun --nproc-per-node 4 examples/resume.py --pp 2 --until 180       # and on two data-parallel pipelines

Remove runs/resume to begin anew.
"""

import argparse
from pathlib import Path

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
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def data(step: int, samples: int = 64) -> tuple[Tensor, Tensor]:
    """Of step `step`, whatever came before: so the data needs no saving."""
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(step))
    return x, x.view(samples, 4, 4).square().sum(-1).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--until", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("runs/resume"))
    asked = parser.parse_args()
    torch.set_num_threads(1)  # these tensors are too small to be shared by threads

    config = {
        "run": {"steps": 180},
        "optimizer": {"lr": 5e-3, "schedule": "cosine"},
        "zero": {"level": asked.level},
        "parallel": {"pp": asked.pp, "micro_batch": 16},
    }
    engine = zero3d.Engine(build, loss, "adamw", config)
    begin = engine.load(asked.folder).step if asked.folder.is_dir() else 0
    if engine.rank == 0:
        print(f"{f'goes on from step {begin}' if begin else 'begins'}: {engine.world} ranks, level {asked.level}")
    for step in range(begin, asked.until):
        x, y = (part.chunk(engine.dp_size)[engine.dp_index] for part in data(step))
        report = engine.step((x, y))
        if engine.rank == 0 and report.step % 20 == 0:
            print(f"step {report.step:3}  loss {report.loss:.6f}")
    saved = engine.save(asked.folder)
    if engine.rank == 0:
        print(f"saved {saved}")
    engine.close()


if __name__ == "__main__":
    main()
