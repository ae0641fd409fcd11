"""A step over tensor-parallel ranks beside torch's own, in one interleaved run; prints one JSON line.

    python benchmarks/tensor.py [--ranks 2] [--rounds 10] [--small]

A GPT of 88 million parameters is cut alike: linear layers of blocks by columns and rows, embedding and head by the
vocabulary. `torch` is parallelize_module with logits that stay cut (loss_parallel), `torch_whole` with logits that
are gathered, `torch_sequence` with SequenceParallel; `plain` is one process, and every process has one thread. All
make the same update on the same batch: fp32, fused AdamW, no clipping; zero3d reports the gradient norm as well.

In each round every contender makes one step, in an order drawn anew; a figure is the median over rounds of the ratio
of two steps of the same round, `ratios` are its quartiles. A contender whose losses are not those of `plain` is void.
All of them together take 9 GB on two ranks.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from step import Batch, Step, adamw, build, quartiles, start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import zero3d

SIZE = {"width": 768, "layers": 12, "heads": 12, "vocabulary": 2048, "length": 256, "batch": 2}
SMALL = {"width": 256, "layers": 4, "heads": 8, "vocabulary": 2048, "length": 128, "batch": 4}
WARM_UP = 2
TOLERANCE = 1e-4
"""Of losses, relative: what fp32 sums in another order come to in so many steps is far less."""
RIVALS = [
    ("zero3d", "torch"),
    ("zero3d", "torch_whole"),
    ("zero3d_sequence", "torch_sequence"),
    ("zero3d_sequence", "torch"),
    ("zero3d", "plain"),
    ("torch", "plain"),
]


def main() -> None:
    options = arguments()
    if "RANK" not in os.environ:
        start_ranks(options.ranks)
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    contenders = {
        "plain": plain(options),
        "torch": parallelized(options, cut_logits=True),
        "torch_whole": parallelized(options, cut_logits=False),
        "torch_sequence": parallelized(options, cut_logits=True, sequence=True),
        "zero3d": engine(options),
        "zero3d_sequence": engine(options, sequence=True),
    }
    seconds, losses = measure(contenders, options)
    if dist.get_rank() == 0:
        print(json.dumps(summary(options, seconds, losses)), flush=True)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="a model of 4 million parameters, to try it out")
    options = parser.parse_args()
    vars(options).update(SMALL if options.small else SIZE)
    return options


def plain(options: argparse.Namespace) -> Step:
    """On the first rank alone, while the others wait."""
    if dist.get_rank():
        return lambda batch: 0.0
    model = build(options)
    return looped(model, adamw(model.parameters()))


def parallelized(options: argparse.Namespace, *, cut_logits: bool, sequence: bool = False) -> Step:
    model = build(options)
    logits = Shard(-1) if cut_logits else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=logits, use_local_output=not cut_logits),
    }
    if sequence:
        whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        plan |= {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.attention_norm": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(**whole),
            "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.mlp_norm": SequenceParallel(),
            "blocks.*.mlp": PrepareModuleInput(**whole),
            "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=logits, use_local_output=not cut_logits),
        }
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    parameters = list(model.parameters())
    # The fused AdamW takes no group of both kinds.
    kinds = [[one for one in parameters if isinstance(one, DTensor) is cut] for cut in (True, False)]
    optimizer = adamw([{"params": kind} for kind in kinds if kind])
    return looped(model, optimizer, loss_parallel if cut_logits else nullcontext)


def looped(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    region: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    def step(batch: Batch) -> float:
        with region():
            loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach()
        return float(value.full_tensor() if isinstance(value, DTensor) else value)

    return step


def engine(options: argparse.Namespace, *, sequence: bool = False) -> Step:
    def loss(logits: object, batch: Batch) -> object:
        return zero3d.cross_entropy(logits, batch["targets"])  # type: ignore[arg-type]

    parallel = {"tp": options.ranks, "sequence_parallel": sequence, "micro_batch": options.batch}
    made = zero3d.Engine(build(options), loss, adamw, {"parallel": parallel})  # type: ignore[arg-type]
    return lambda batch: made.step(batch).loss


def measure(
    contenders: dict[str, Step], options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of the timed rounds and losses of all."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds + WARM_UP):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, options.vocabulary, (options.batch, options.length + 1), generator=generator)
        batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        for name in random.Random(number).sample(names, len(names)):
            dist.barrier()
            began = time.perf_counter()
            losses[name].append(contenders[name](batch))
            dist.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds, losses


def summary(
    options: argparse.Namespace, seconds: dict[str, list[float]], losses: dict[str, list[float]]
) -> dict[str, object]:
    def ratios(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(seconds[one], seconds[other])]

    apart = {name: max(abs(a / b - 1) for a, b in zip(row, losses["plain"])) for name, row in losses.items()}
    void = [name for name, most in apart.items() if not most <= TOLERANCE]
    pairs = {f"{one}/{other}": ratios(one, other) for one, other in RIVALS if one not in void and other not in void}
    return {
        "benchmark": "tensor",
        "parameters": sum(parameter.numel() for parameter in build(options).parameters()),
        **vars(options),
        "torch": torch.__version__,
        "median_ms": {name: round(statistics.median(times) * 1e3, 1) for name, times in seconds.items()},
        "ratio": {pair: round(statistics.median(found), 3) for pair, found in pairs.items()},
        "ratios": {pair: quartiles(found) for pair, found in pairs.items()},
        "void": void,
        "loss": round(losses["plain"][-1], 6),
        "losses_apart": {name: float(f"{most:.1e}") for name, most in apart.items()},
    }


if __name__ == "__main__":
    main()
