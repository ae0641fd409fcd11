"""A step in pipeline stages beside torch's own, schedule by schedule; prints one JSON line for each.

    python benchmarks/pipeline.py [--pp 2 4] [--schedules 1f1b zbv] [--rounds 8] [--small]

A GPT of 88 million parameters (`--small`: 10 million) is cut into the same stages by both, and trains on the same 8
micro-batches of one sequence: fp32, fused AdamW, no clipping, the same loss function, one thread a rank. torch's
`zbh1` is its InterleavedZeroBubble with one stage a rank. zero3d reports loss and gradient norm on every rank as well.

In each round both make one step, in an order drawn anew; `ratio` is the median over rounds of zero3d's time by torch's
in the same round, `ratios` its quartiles; `processor_ratio` is the same of the processor time of all ranks together,
which waits are no part of. Losses that disagree make a row void.

`peak_mb` is counted, not resident, memory, for each rank: what tensors hold between steps (weights, gradients,
optimizer state, buffers) and the most that torch's allocator gave out beyond that within a step. `activations_mb` are
the most bytes that tensors saved for backward had at once. Both are found in a step that is not timed.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from step import Batch, Step, adamw, build, quartiles, torchrun
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.profiler import ProfilerActivity, profile, record_function

import zero3d
from zero3d.models.losses import next_token_loss
from zero3d.pipeline.schedules.registry import named

SIZE = {"width": 768, "layers": 12, "heads": 12, "vocabulary": 2048, "length": 128}
SMALL = {"width": 256, "layers": 8, "heads": 8, "vocabulary": 8192, "length": 128}
MICRO_BATCHES = 8
WARM_UP = 2
WEIGHED = "weighed"
"""The step that is."""
TOLERANCE = 1e-4
"""Of losses, relative: what fp32 sums in another order come to in so many steps is far less."""
SCHEDULES = {
    "gpipe": (1, pipelining.ScheduleGPipe),
    "1f1b": (1, pipelining.Schedule1F1B),
    "interleaved": (2, pipelining.ScheduleInterleaved1F1B),
    "zbh1": (1, pipelining.ScheduleInterleavedZeroBubble),
    "zbv": (2, pipelining.ScheduleZBVZeroBubble),
}
"""Stages a rank, and what torch has of that name or nearest to it."""
SINGLE = (pipelining.ScheduleGPipe, pipelining.Schedule1F1B)
"""torch's schedules that take one stage, not a list of stages."""


@dataclass
class Rows:
    """Of one contender: seconds on the clock and of all ranks' processors, round by round, and losses."""

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def main() -> None:
    options = arguments()
    if "RANK" not in os.environ:
        codes = [start_ranks(ranks, name) for ranks in options.pp for name in options.schedules]
        sys.exit(max(codes))
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    (schedule,) = options.schedules
    makers = {"zero3d": zero3d_step, "torch": torch_step}
    steps: dict[str, Step] = {}
    memory: dict[str, dict[str, list[float]]] = {}
    for name, make in makers.items():
        steps[name], memory[name] = weighed(lambda make=make: make(options, schedule), options)  # type: ignore[misc]
    rows = measure(steps, options)
    if dist.get_rank() == 0:
        print(json.dumps(summary(options, schedule, rows, memory)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a model of 10 million parameters")
    options = parser.parse_args()
    vars(options).update(SMALL if options.small else SIZE)
    return options


def start_ranks(ranks: int, schedule: str) -> int:
    """One schedule on ranks of its own, so that no other's tensors are there."""
    words, environment = torchrun(ranks, *sys.argv, "--pp", str(ranks), "--schedules", schedule)
    return subprocess.run(words, env=environment, check=False).returncode


def cuts(options: argparse.Namespace, stages: int) -> list[int]:
    """The first block of each stage, and the number of blocks: as even as can be."""
    return [round(stage * options.layers / stages) for stage in range(stages + 1)]


def zero3d_step(options: argparse.Namespace, schedule: str) -> Step:
    ranks, (per_rank, _) = dist.get_world_size(), SCHEDULES[schedule]
    at = cuts(options, ranks * per_rank)
    parallel = {
        "pp": ranks,
        "schedule": schedule,
        "stages_per_rank": per_rank,
        "stage_blocks": [end - start for start, end in pairwise(at)],
        "micro_batch": 1,
    }
    engine = zero3d.Engine(build(options), next_token_loss, adamw, {"parallel": parallel})
    return lambda batch: engine.step(batch).loss


def torch_step(options: argparse.Namespace, schedule: str) -> Step:
    ranks, rank, (per_rank, kind) = dist.get_world_size(), dist.get_rank(), SCHEDULES[schedule]
    number = ranks * per_rank
    mine = named(schedule).placement(number, ranks)[rank]
    model, at = build(options), cuts(options, number)

    def part(stage: int) -> nn.Module:
        ends = [model.embedding] if stage == 0 else [], [model.norm, model.head] if stage == number - 1 else []
        return nn.Sequential(*ends[0], *model.blocks[at[stage] : at[stage + 1]], *ends[1])

    modules = {stage: part(stage) for stage in sorted(mine)}
    stages = [pipelining.PipelineStage(module, stage, number, torch.device("cpu")) for stage, module in modules.items()]
    runner = kind(stages[0] if kind in SINGLE else stages, n_microbatches=MICRO_BATCHES, loss_fn=mean_loss)
    optimizer = adamw([one for module in modules.values() for one in module.parameters()])
    holder = next(other for other in range(ranks) if number - 1 in named(schedule).placement(number, ranks)[other])

    def step(batch: Batch) -> float:
        losses: list[Tensor] = []
        inputs = (batch["tokens"],) if 0 in modules else ()
        # A schedule that is not told returns all outputs together, which costs a copy of them.
        last = {"target": batch["targets"], "losses": losses} if number - 1 in modules else {}
        runner.step(*inputs, **last, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack([one.detach() for one in losses]).mean() if losses else torch.zeros(())
        dist.broadcast(loss, holder)
        return float(loss)

    return step


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    total, count = next_token_loss(logits, {"targets": targets})
    return total / count


def batch_of(number: int, options: argparse.Namespace) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, options.vocabulary, (MICRO_BATCHES, options.length + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def weighed(make: Callable[[], Step], options: argparse.Namespace) -> tuple[Step, dict[str, list[float]]]:
    """What `make` gives, after two steps, and the megabytes that its steps take on each rank."""
    before = held_bytes()
    step = make()
    saved = Saved()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(batch_of(0, options))  # What it allocates is known to the profiler when the next step frees it.
        held = held_bytes() - before
        with record_function(WEIGHED), torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            step(batch_of(1, options))
    mine = torch.tensor([held + most_allocated(profiled), saved.most], dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    peak, activations = ([round(one / 1e6, 1) for one in column] for column in torch.stack(rows).t().tolist())
    return step, {"peak_mb": peak, "activations_mb": activations}


class Saved:
    """Counts the storages that autograd keeps for backward; parameters and what others keep alive are left out."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._users: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        # A stand-in of its own: its end tells that autograd has let go. Leaves must stay what they are.
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        kept = tensor.detach()
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        self._users[key] = self._users.get(key, 0) + 1
        if self._users[key] == 1:
            self.now += size
            self.most = max(self.most, self.now)
        weakref.finalize(kept, self._let_go, key, size)
        return kept

    def _let_go(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            self.now -= size


def held_bytes() -> int:
    """Of all tensors that there are, each storage once."""
    gc.collect()
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for one in gc.get_objects():
            if issubclass(type(one), Tensor) and one.layout is torch.strided and one.device.type == "cpu":
                storage = one.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def most_allocated(profiled: profile) -> int:
    """Bytes beyond those at the beginning of `WEIGHED`."""
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    began = next(one.start_ns() for one in events if one.name() == WEIGHED)
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    now = most = 0
    for at, change in changes:
        if at >= began:
            now += change
            most = max(most, now)
    return most


def measure(steps: dict[str, Step], options: argparse.Namespace) -> dict[str, Rows]:
    """What each had in the timed rounds, and losses of all."""
    rows = {name: Rows() for name in steps}
    for number in range(options.rounds + WARM_UP):
        batch = batch_of(number + 2, options)
        for name in random.Random(number).sample(list(steps), len(steps)):
            dist.barrier()
            began, processor = time.perf_counter(), time.process_time()
            loss = steps[name](batch)
            mine = torch.tensor(time.process_time() - processor)
            dist.all_reduce(mine)
            rows[name].losses.append(loss)
            if number >= WARM_UP:
                rows[name].seconds.append(time.perf_counter() - began)
                rows[name].processor.append(float(mine))
    return rows


def summary(
    options: argparse.Namespace,
    schedule: str,
    rows: dict[str, Rows],
    memory: dict[str, dict[str, list[float]]],
) -> dict[str, object]:
    ours, theirs = rows["zero3d"], rows["torch"]
    apart = max(abs(one / other - 1) for one, other in zip(ours.losses, theirs.losses))
    ratios = [one / other for one, other in zip(ours.seconds, theirs.seconds)]
    processor = statistics.median(one / other for one, other in zip(ours.processor, theirs.processor))
    void = not apart <= TOLERANCE
    return {
        "benchmark": "pipeline",
        "schedule": schedule,
        "pp": dist.get_world_size(),
        "stages_per_rank": SCHEDULES[schedule][0],
        "parameters": sum(parameter.numel() for parameter in build(options).parameters()),
        "micro_batches": MICRO_BATCHES,
        "length": options.length,
        "rounds": options.rounds,
        "torch": torch.__version__,
        "median_ms": {name: round(statistics.median(row.seconds) * 1e3, 1) for name, row in rows.items()},
        "ratio": None if void else round(statistics.median(ratios), 3),
        "ratios": quartiles(ratios),
        "processor_ratio": None if void else round(processor, 3),
        "void": void,
        "loss": round(ours.losses[-1], 6),
        "losses_apart": float(f"{apart:.1e}"),
        "memory": memory,
    }


if __name__ == "__main__":
    main()
