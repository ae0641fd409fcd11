"""Steps of ZeRO levels beside torch's and DeepSpeed's own, in one interleaved run; prints one JSON line.

    python benchmarks/step.py [--contenders zero0 ddp ...] [--ranks 2] [--rounds 12] [--medium]

All make the same update of the same GPT on the same batch: fp32, fused AdamW, no clipping, one thread a rank:

zero0 to zero3       zero3d; with `_host` the optimizer is offloaded; it reports the gradient norm of every step as well
ddp, ddp_norm        DistributedDataParallel; the second in a loop that reads the gradient norm too
redundancy           DistributedDataParallel and ZeroRedundancyOptimizer
fsdp2, fsdp2_kept    fully_shard, one unit a block, the root for the rest; `kept` does not reshard after forward
ds1 to ds3           DeepSpeed, buckets of 8e6 elements, at stage 3 live parameters and reuse distance of 8e6, so that
                     it does release; with `_host` its CPU offload. Where DeepSpeed is not installed they are left out.
alone                one process with as many threads as there are ranks, and all of the batch: what computing costs

In each round every contender makes one step, in an order drawn anew (what one frees, the next may have to map again);
a ratio is the median over rounds of two steps of the same round, with its quartiles. `sent_mb` are bytes that left over
the loopback interface, by rank and step; `losses_apart` is the largest relative difference of a loss from zero3d's
own first contender's: beyond 1e-4 a row is void.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zero3d
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.losses import next_token_loss

Batch = dict[str, Tensor]
Step = Callable[[Batch], float]

SMALL = {"width": 256, "layers": 8, "heads": 8, "vocabulary": 8192, "length": 128, "batch": 8}
MEDIUM = {"width": 768, "layers": 12, "heads": 12, "vocabulary": 2048, "length": 64, "batch": 8}
ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
DEFAULT = ["zero0", "zero1", "zero2", "zero3", "ddp", "ddp_norm", "fsdp2"]
RIVALS = {
    "zero0": ["ddp", "ddp_norm", "alone"],
    "zero1": ["ddp", "redundancy", "ds1", "alone"],
    "zero2": ["ddp", "ds2", "fsdp2_kept", "alone"],
    "zero3": ["fsdp2", "ds3", "alone"],
    "zero2_host": ["ds2_host", "alone"],
    "zero3_host": ["ds3_host", "alone"],
}
WARM_UP = 2
TOLERANCE = 1e-4
BUCKET = 8_000_000
"""Elements, of DeepSpeed: its own default of 5e8 holds all of these models, and is slower."""


def main() -> None:
    options = arguments()
    if "RANK" not in os.environ:
        start_ranks(options.ranks)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    contenders = {name: made(name, options) for name in options.contenders if not absent(name)}
    rows = measure(contenders, options)
    if dist.get_rank() == 0:
        print(json.dumps(summary(options, rows)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=DEFAULT)
    parser.add_argument("--medium", action="store_true", help="a model of 88 million parameters; else of 10 million")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    for name in SMALL:
        parser.add_argument(f"--{name}", type=int, help="in place of the model's own")
    options = parser.parse_args()
    for name, value in (MEDIUM if options.medium else SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def start_ranks(ranks: int) -> None:
    words, environment = torchrun(ranks, *sys.argv)
    sys.exit(subprocess.run(words, env=environment, check=False).returncode)


def torchrun(ranks: int, *words: str) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of a script and its arguments on ranks of one thread, which meet over loopback."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    return command, environment


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
    return torch.optim.AdamW(parameters, fused=True, **ADAM)  # type: ignore[arg-type]


def absent(name: str) -> bool:
    return name.startswith("ds") and find_spec("deepspeed") is None


def made(name: str, options: argparse.Namespace) -> Step:
    kind, _, how = name.partition("_")
    if kind.startswith("zero"):
        return engine(options, int(kind[-1]), how)
    if kind.startswith("ds"):
        return deepspeed_step(options, int(kind[-1]), how)
    kinds: Mapping[str, Callable[[argparse.Namespace, str], Step]] = {
        "ddp": ddp,
        "redundancy": redundancy,
        "fsdp2": fsdp,
        "alone": alone,
    }
    return kinds[kind](options, how)


def engine(options: argparse.Namespace, level: int, how: str) -> Step:
    config: dict[str, Any] = {"zero": {"level": level}}
    if how == "host":
        config["offload"] = {"optimizer": "host"}
    made = zero3d.Engine(build(options), next_token_loss, adamw, config)
    return lambda batch: made.step(batch).loss


def ddp(options: argparse.Namespace, how: str) -> Step:
    model = DistributedDataParallel(build(options))
    return plain_step(model, adamw(model.parameters()), norm=how == "norm")


def redundancy(options: argparse.Namespace, how: str) -> Step:
    model = DistributedDataParallel(build(options))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **ADAM)
    return plain_step(model, optimizer)


def fsdp(options: argparse.Namespace, how: str) -> Step:
    model = build(options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=how != "kept")
    fully_shard(model, mesh=mesh, reshard_after_forward=how != "kept")
    return plain_step(model, adamw(model.parameters()))


def alone(options: argparse.Namespace, how: str) -> Step:
    """Rank 0 computes with everyone's threads, the others wait."""
    if dist.get_rank():
        return lambda batch: 0.0
    model = build(options)
    step = plain_step(model, adamw(model.parameters()))

    def with_all_threads(batch: Batch) -> float:
        torch.set_num_threads(dist.get_world_size())
        loss = step(batch)
        torch.set_num_threads(1)
        return loss * dist.get_world_size()  # Losses are averaged over ranks, and the others have none.

    return with_all_threads


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


def deepspeed_step(options: argparse.Namespace, stage: int, how: str) -> Step:
    import deepspeed

    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if stage == 3:
        names = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
        zero |= dict.fromkeys(names, BUCKET)
    if how == "host":
        zero["offload_optimizer"] = {"device": "cpu"}
        zero |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    config = {
        "train_micro_batch_size_per_gpu": options.batch // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = build(options)
    made, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step(batch: Batch) -> float:
        total, count = next_token_loss(made(batch["tokens"]), batch)
        loss = total / count
        made.backward(loss)
        made.step()
        return float(loss.detach())

    return step


@dataclass
class Row:
    """Of one contender, round by round. sent: bytes by rank and step."""

    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def measure(contenders: Mapping[str, Step], options: argparse.Namespace) -> dict[str, Row]:
    rows = {name: Row() for name in contenders}
    ranks = dist.get_world_size()
    for number in range(options.rounds + WARM_UP):
        whole, mine = batches(number, options)
        for name in random.Random(number).sample(list(rows), len(rows)):
            dist.barrier()
            sent, began = sent_bytes(), time.perf_counter()
            loss = contenders[name](whole if name == "alone" else mine)
            dist.barrier()
            seconds, sent = time.perf_counter() - began, sent_bytes() - sent
            value = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(value)
            rows[name].losses.append(float(value) / ranks)
            if number >= WARM_UP:
                rows[name].seconds.append(seconds)
                rows[name].sent.append(sent / ranks)
    return rows


def batches(number: int, options: argparse.Namespace) -> tuple[Batch, Batch]:
    """The global batch, and this rank's part of it."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, options.vocabulary, (options.batch, options.length + 1), generator=generator)
    mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    return cut(tokens), cut(mine)


def cut(tokens: Tensor) -> Batch:
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def sent_bytes() -> int:
    """Over the loopback interface, by all processes, since the machine started; headers are counted."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)


def summary(options: argparse.Namespace, rows: Mapping[str, Row]) -> dict[str, object]:
    reference = next(iter(rows.values())).losses
    apart = {
        name: max(abs(one / other - 1) for one, other in zip(row.losses, reference, strict=True))
        for name, row in rows.items()
    }
    pairs = [(one, other) for one, others in RIVALS.items() for other in others if one in rows and other in rows]
    ratios = {
        f"{one}/{other}": [a / b for a, b in zip(rows[one].seconds, rows[other].seconds, strict=True)]
        for one, other in pairs
        if max(apart[one], apart[other]) <= TOLERANCE
    }
    return {
        "benchmark": "step",
        "parameters": sum(parameter.numel() for parameter in build(options).parameters()),
        **{name: value for name, value in vars(options).items() if name != "contenders"},
        "torch": torch.__version__,
        "median_ms": {name: round(statistics.median(row.seconds) * 1e3, 1) for name, row in rows.items()},
        "ratio": {pair: round(statistics.median(found), 3) for pair, found in ratios.items()},
        "ratios": {pair: [round(one, 3) for one in statistics.quantiles(found)] for pair, found in ratios.items()},
        "sent_mb": {name: round(statistics.median(row.sent) / 1e6, 2) for name, row in rows.items()},
        "losses": {name: round(row.losses[-1], 6) for name, row in rows.items()},
        "losses_apart": {name: float(f"{value:.1e}") for name, value in apart.items()},
        "void": [f"{one}/{other}" for one, other in pairs if f"{one}/{other}" not in ratios],
    }


if __name__ == "__main__":
    main()
