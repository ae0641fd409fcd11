"""Each ZeRO level's step beside torch's own, in one interleaved run; prints one JSON line.

    python benchmarks/step.py [--ranks 2] [--rounds 12] [--width 256 --layers 8 --vocabulary 8192]

Level 0 is compared with DistributedDataParallel, level 3 with fully_shard (one unit a block, the root for the rest).
All make the same update of the same model on the same batch: fp32, fused AdamW, no clipping, each library's own
defaults. zero3d reports the gradient norm of every step; `ddp_norm` is DistributedDataParallel in a loop that reads
it too. In each round every contender makes one step, in an order drawn anew (what one frees, the next may have to
map again); a figure is the median over rounds of the ratio of two steps of the same round.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero3d
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.losses import next_token_loss

Batch = dict[str, Tensor]
Step = Callable[[Batch], float]


def main() -> None:
    options = arguments()
    if "RANK" not in os.environ:
        start_ranks(options.ranks)
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    contenders = {"ddp": ddp(options), "ddp_norm": ddp(options, norm=True), "fully_shard": fsdp(options)}
    contenders |= {f"zero{level}": engine(options, level) for level in range(4)}
    seconds, losses = measure(contenders, options)
    if dist.get_rank() == 0:
        print(json.dumps(summary(options, seconds, losses)), flush=True)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "ranks": 2,
        "rounds": 12,
        "width": 256,
        "layers": 8,
        "heads": 8,
        "vocabulary": 8192,
        "length": 128,
        "batch": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def start_ranks(ranks: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *sys.argv]
    sys.exit(subprocess.run([sys.executable, *words], env=environment, check=False).returncode)


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(
            vocabulary=options.vocabulary,
            sequence_length=options.length,
            width=options.width,
            layers=options.layers,
            heads=options.heads,
            tied=False,
        )
    )


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)  # type: ignore[arg-type]


def ddp(options: argparse.Namespace, *, norm: bool = False) -> Step:
    model = DistributedDataParallel(build(options))
    return plain_step(model, adamw(model.parameters()), norm=norm)


def fsdp(options: argparse.Namespace) -> Step:
    model = build(options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_step(model, adamw(model.parameters()))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, norm: bool = False) -> Step:
    def step(batch: Batch) -> float:
        total, count = next_token_loss(model(batch["tokens"]), batch)
        loss = total / count
        loss.backward()
        if norm:
            float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def engine(options: argparse.Namespace, level: int) -> Step:
    made = zero3d.Engine(build(options), next_token_loss, adamw, {"zero": {"level": level}})
    return lambda batch: made.step(batch).loss


def measure(
    contenders: dict[str, Step], options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float]]:
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number in range(options.rounds + 2):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, options.vocabulary, (options.batch, options.length + 1), generator=generator)
        mine = tokens.chunk(ranks)[rank]
        batch = {"tokens": mine[:, :-1].contiguous(), "targets": mine[:, 1:].contiguous()}
        for name in random.Random(number).sample(names, len(names)):
            dist.barrier()
            began = time.perf_counter()
            loss = contenders[name](batch)
            dist.barrier()
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
            value = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(value)
            losses[name] = float(value) / ranks
    return seconds, losses


def summary(
    options: argparse.Namespace, seconds: dict[str, list[float]], losses: dict[str, float]
) -> dict[str, object]:
    def ratio(one: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds[one], seconds[other])), 3)

    rivals = [("zero0", "ddp"), ("zero0", "ddp_norm"), ("zero1", "ddp"), ("zero2", "ddp"), ("zero3", "fully_shard")]
    rivals += [("zero2", "fully_shard")]
    return {
        "benchmark": "step",
        "parameters": sum(parameter.numel() for parameter in build(options).parameters()),
        **vars(options),
        "torch": torch.__version__,
        "median_ms": {name: round(statistics.median(times) * 1e3, 1) for name, times in seconds.items()},
        "ratio": {f"{one}/{other}": ratio(one, other) for one, other in rivals},
        "losses": {name: round(loss, 6) for name, loss in losses.items()},
    }


if __name__ == "__main__":
    main()
