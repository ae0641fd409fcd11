"""What zero3d costs on a model of many small blocks, on one rank, beside plain torch; prints one JSON line.

    python benchmarks/overhead.py [--blocks 400] [--width 64] [--batch 512] [--rounds 20]

Blocks so small that nearly all of a step is bookkeeping: the worst case for hooks and buckets. Each round times one
step of every contender in an order drawn anew; a figure is the median over rounds of the ratio of two steps of the
same round. Plain torch is the usual loop: forward, backward, fused AdamW over all parameters. `us_a_block` is what is
slower than plain torch, by block and step, in microseconds.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zero3d


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"blocks": 400, "width": 64, "batch": 512, "rounds": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(0))
    contenders: dict[str, Callable[[], float]] = {"plain": plain(options, batch)}
    contenders |= {f"zero{level}": engine(options, batch, level) for level in range(4)}
    contenders |= {f"shard{level}": own_loop(options, batch, level) for level in range(1, 4)}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for number in range(options.rounds + 2):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            began = time.perf_counter()
            losses[name] = contenders[name]()
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
    print(
        json.dumps(
            {
                "benchmark": "overhead",
                **vars(options),
                "parameters": sum(parameter.numel() for parameter in build(options).parameters()),
                "torch": torch.__version__,
                "median_ms": {name: round(statistics.median(times) * 1e3, 1) for name, times in seconds.items()},
                "ratio_to_plain": {
                    name: round(statistics.median(a / b for a, b in zip(times, seconds["plain"])), 3)
                    for name, times in seconds.items()
                },
                "us_a_block": {
                    name: round(
                        statistics.median(a - b for a, b in zip(times, seconds["plain"])) / options.blocks * 1e6
                    )
                    for name, times in seconds.items()
                },
                "losses": {name: round(loss, 6) for name, loss in losses.items()},
            }
        )
    )


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return Deep(options.blocks, options.width)


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)  # type: ignore[arg-type]


def plain(options: argparse.Namespace, batch: Tensor) -> Callable[[], float]:
    model = build(options)
    return looped(model, adamw(model.parameters()), batch)


def own_loop(options: argparse.Namespace, batch: Tensor, level: int) -> Callable[[], float]:
    model = build(options)
    optimizer = adamw(model.parameters())
    zero3d.shard(model, optimizer, level=level)
    return looped(model, optimizer, batch)


def looped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Callable[[], float]:
    def step() -> float:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def engine(options: argparse.Namespace, batch: Tensor, level: int) -> Callable[[], float]:
    made = zero3d.Engine(build(options), lambda out, _: out.square().mean(), adamw, {"zero": {"level": level}})
    return lambda: made.step(batch).loss


if __name__ == "__main__":
    main()
