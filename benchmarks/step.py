"""Steps of ZeRO levels beside torch's and DeepSpeed's own, in one interleaved run; prints one JSON line.

    python benchmarks/step.py [--contenders zero0 ddp ...] [--ranks 2] [--rounds 12] [--steps 1] [--medium]

All make the same update of the same GPT on the same batch: fp32, fused AdamW, no clipping, one thread a rank:

zero0 to zero3       zero3d; with `_host` the optimizer is offloaded; it reports the gradient norm of every step as well
ddp, ddp_norm        DistributedDataParallel; the second in a loop that reads the gradient norm too
redundancy           DistributedDataParallel and ZeroRedundancyOptimizer
fsdp2, fsdp2_kept    fully_shard, one unit a block, the root for the rest; `kept` does not reshard after forward
ds1 to ds3           DeepSpeed, buckets of 8e6 elements, at stage 3 live parameters and reuse distance of 8e6, so that
                     it does release; with `_host` its CPU offload. Where DeepSpeed is not installed they are left out.
alone                one process with as many threads as there are ranks, and all of the batch: what computing costs
apart                each rank trains a copy of its own on its part of the batch, and sends nothing: what computing in
                     as many processes costs
wire                 no training: each rank sends the others their parts of all gradients, and those of it all weights

With `_compiled` behind zero0 to zero3, ddp, fsdp2 and alone, blocks are compiled; with `_bf16`, all but the optimizer
is in bf16, and so is what travels. In each round every contender makes `steps` steps, in an order drawn anew (what one
frees, the next may have to map again); a ratio is the median over rounds of two times of the same round, with its
quartiles. `sent_mb` are bytes that left over the interface in use, by rank and step; `losses_apart` is the largest
relative difference of a loss from the first contender's: beyond 1e-4 (bf16: 1e-2) a row is void. `backward_ms` is
backward's part of `apart`, behind which a link's time could hide.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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
    "zero0": ["ddp", "ddp_norm", "alone", "apart"],
    "zero1": ["ddp", "redundancy", "ds1", "alone", "apart"],
    "zero2": ["ddp", "ds2", "fsdp2_kept", "alone", "apart"],
    "zero3": ["fsdp2", "ds3", "alone", "apart"],
    "zero2_host": ["ds2_host", "alone"],
    "zero3_host": ["ds3_host", "alone"],
    "zero0_compiled": ["ddp_compiled", "alone_compiled"],
    "zero3_compiled": ["fsdp2_compiled", "alone_compiled"],
    "zero1_bf16": ["ds1_bf16"],
    "zero2_bf16": ["ds2_bf16", "fsdp2_kept_bf16"],
    "zero3_bf16": ["ds3_bf16", "fsdp2_bf16"],
}
NO_TRAINING = ("apart", "wire")
"""Their losses are other ones."""
WARM_UP = 2
TOLERANCE = 1e-4
BF16_TOLERANCE = 1e-2
BUCKET = 8_000_000
"""Elements, of DeepSpeed: its own default of 5e8 holds all of these models, and is slower."""


def main() -> None:
    options = arguments()
    start_ranks(options.ranks)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    contenders: dict[str, Step] = {name: made(name, options) for name in options.contenders if not absent(name)}
    rows = measure(contenders, options)
    if dist.get_rank() == 0:
        print(json.dumps(summary(options, rows) | backward_ms(contenders.values())), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=DEFAULT)
    parser.add_argument("--medium", action="store_true", help="a model of 88 million parameters; else of 10 million")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1, help="that a contender makes in its turn of a round")
    for name in SMALL:
        parser.add_argument(f"--{name}", type=int, help="in place of the model's own")
    options = parser.parse_args()
    for name, value in (MEDIUM if options.medium else SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def start_ranks(ranks: int) -> None:
    """Runs this script on so many ranks and ends; goes on where it is one of them."""
    if "RANK" in os.environ:
        return
    words, environment = torchrun(ranks, *sys.argv)
    sys.exit(subprocess.run(words, env=environment, check=False).returncode)


def torchrun(ranks: int, *words: str) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of a script and its arguments on ranks of one thread, which meet over loopback."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    return command, os.environ | surroundings("lo")


def surroundings(interface: str) -> dict[str, str]:
    """What ranks find in their environment."""
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface, "DS_ACCELERATOR": "cpu"}


def build(options: argparse.Namespace, how: Sequence[str] = ()) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            vocabulary=options.vocabulary,
            sequence_length=options.length,
            width=options.width,
            layers=options.layers,
            heads=options.heads,
            tied=False,
        )
    )
    for block in model.blocks if "compiled" in how else ():
        block.compile()
    return model


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **ADAM)  # type: ignore[arg-type]


def absent(name: str) -> bool:
    return name.startswith("ds") and find_spec("deepspeed") is None


def made(name: str, options: argparse.Namespace) -> Step:
    kind, *how = name.split("_")
    if kind.startswith("zero"):
        return engine(options, int(kind[-1]), how)
    if kind.startswith("ds"):
        return deepspeed_step(options, int(kind[-1]), how)
    kinds: Mapping[str, Callable[[argparse.Namespace, Sequence[str]], Step]] = {
        "ddp": ddp,
        "redundancy": redundancy,
        "fsdp2": fsdp,
        "alone": alone,
        "apart": Apart,
        "wire": wire,
    }
    return kinds[kind](options, how)


def engine(options: argparse.Namespace, level: int, how: Sequence[str]) -> Step:
    config: dict[str, Any] = {"zero": {"level": level}}
    if "host" in how:
        config["offload"] = {"optimizer": "host"}
    if "bf16" in how:
        config["precision"] = {"compute": "bf16", "reduce": "bf16"}
    made = zero3d.Engine(build(options, how), next_token_loss, adamw, config)
    return lambda batch: made.step(batch).loss


def ddp(options: argparse.Namespace, how: Sequence[str]) -> Step:
    model = DistributedDataParallel(build(options, how))
    return plain_step(model, adamw(model.parameters()), norm="norm" in how)


def redundancy(options: argparse.Namespace, how: Sequence[str]) -> Step:
    model = DistributedDataParallel(build(options, how))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **ADAM)
    return plain_step(model, optimizer)


def fsdp(options: argparse.Namespace, how: Sequence[str]) -> Step:
    model = build(options, how)
    narrow = torch.bfloat16 if "bf16" in how else None
    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": "kept" not in how,
        "mp_policy": MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow),
    }
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return plain_step(model, adamw(model.parameters()))


def alone(options: argparse.Namespace, how: Sequence[str]) -> Step:
    """Rank 0 computes with everyone's threads, the others wait."""
    if dist.get_rank():
        return lambda batch: 0.0
    model = build(options, how)
    step = plain_step(model, adamw(model.parameters()))

    def with_all_threads(batch: Batch) -> float:
        torch.set_num_threads(dist.get_world_size())
        loss = step(batch)
        torch.set_num_threads(1)
        return loss * dist.get_world_size()  # Losses are averaged over ranks, and the others have none.

    return with_all_threads


class Apart:
    """A step without anyone else, and how long its backwards take."""

    def __init__(self, options: argparse.Namespace, how: Sequence[str]) -> None:
        self.backward_seconds: list[float] = []
        self._model = build(options)
        self._optimizer = adamw(self._model.parameters())
        self._narrow = torch.autocast("cpu", torch.bfloat16, enabled="bf16" in how)

    def __call__(self, batch: Batch) -> float:
        with self._narrow:
            total, count = next_token_loss(self._model(batch["tokens"]), batch)
        loss = total / count
        began = time.perf_counter()
        loss.backward()
        self.backward_seconds.append(time.perf_counter() - began)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())


def wire(options: argparse.Namespace, how: Sequence[str]) -> Step:
    """gloo's own sends, of as many bytes as levels 0 to 2 must send."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dtype = torch.bfloat16 if "bf16" in how else torch.float32
    part = -(-sum(parameter.numel() for parameter in build(options).parameters()) // ranks)
    rows = torch.zeros(2, ranks, part, dtype=dtype)

    def step(batch: Batch) -> float:
        for _ in range(2):
            others = [(rank + away) % ranks for away in range(1, ranks)]
            works = [dist.irecv(rows[1][other], other) for other in others]
            works += [dist.isend(rows[0][other], other) for other in others]
            for work in works:
                work.wait()  # type: ignore[union-attr]
        return 0.0

    return step


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


def deepspeed_step(options: argparse.Namespace, stage: int, how: Sequence[str]) -> Step:
    import deepspeed

    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if stage == 3:
        names = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
        zero |= dict.fromkeys(names, BUCKET)
    if "host" in how:
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
        "bf16": {"enabled": "bf16" in how},
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
        turns = [batches(number * options.steps + step, options) for step in range(options.steps)]
        for name in random.Random(number).sample(list(rows), len(rows)):
            dist.barrier()
            sent, began = sent_bytes(), time.perf_counter()
            losses = [contenders[name](whole if name.startswith("alone") else mine) for whole, mine in turns]
            dist.barrier()
            seconds, sent = time.perf_counter() - began, sent_bytes() - sent
            value = torch.tensor(losses, dtype=torch.float64)
            dist.all_reduce(value)
            rows[name].losses += (value / ranks).tolist()
            if number >= WARM_UP:
                rows[name].seconds.append(seconds / options.steps)
                rows[name].sent.append(sent / options.steps)
    return rows


def batches(number: int, options: argparse.Namespace) -> tuple[Batch, Batch]:
    """The global batch, and this rank's part of it."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, options.vocabulary, (options.batch, options.length + 1), generator=generator)
    mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    return cut(tokens), cut(mine)


def cut(tokens: Tensor) -> Batch:
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def sent_bytes() -> float:
    """By rank, over the interface in use, since the machine started, headers and all. Over loopback all ranks send."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    sent = next((int(line.split()[9]) for line in lines if line.strip().startswith(f"{interface}:")), 0)
    return sent / (dist.get_world_size() if interface == "lo" else 1)


def backward_ms(steps: Iterable[Step]) -> dict[str, float]:
    found = [seconds for step in steps if isinstance(step, Apart) for seconds in step.backward_seconds]
    return {"backward_ms": round(statistics.median(found) * 1e3, 1)} if found else {}


def summary(options: argparse.Namespace, rows: Mapping[str, Row]) -> dict[str, object]:
    reference = next(iter(rows.values())).losses
    most = BF16_TOLERANCE if any("bf16" in name for name in rows) else TOLERANCE
    apart = {
        name: 0.0
        if name.startswith(NO_TRAINING)
        else max(abs(one / other - 1) for one, other in zip(row.losses, reference, strict=True))
        for name, row in rows.items()
    }
    pairs = [(one, other) for one, others in RIVALS.items() for other in others if one in rows and other in rows]
    ratios = {
        f"{one}/{other}": [a / b for a, b in zip(rows[one].seconds, rows[other].seconds, strict=True)]
        for one, other in pairs
        if max(apart[one], apart[other]) <= most
    }
    return {
        "benchmark": "step",
        "parameters": sum(parameter.numel() for parameter in build(options).parameters()),
        **{name: value for name, value in vars(options).items() if name != "contenders"},
        "torch": torch.__version__,
        "median_ms": {name: round(statistics.median(row.seconds) * 1e3, 1) for name, row in rows.items()},
        "ratio": {pair: round(statistics.median(found), 3) for pair, found in ratios.items()},
        "ratios": {pair: quartiles(found) for pair, found in ratios.items()},
        "sent_mb": {name: round(statistics.median(row.sent) / 1e6, 2) for name, row in rows.items()},
        "losses": {name: round(row.losses[-1], 6) for name, row in rows.items()},
        "losses_apart": {name: float(f"{value:.1e}") for name, value in apart.items()},
        "void": [f"{one}/{other}" for one, other in pairs if f"{one}/{other}" not in ratios],
    }


def quartiles(found: list[float]) -> list[float]:
    return [round(one, 3) for one in (statistics.quantiles(found, n=4) if len(found) > 1 else found)]


if __name__ == "__main__":
    main()
