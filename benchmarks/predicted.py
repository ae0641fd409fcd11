"""The planner's step times beside measured ones on this machine, after `zero3d calibrate`.

    zero3d calibrate --out profile.json -n 2
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/predicted.py --profile profile.json \
        [--dtype fp32] [--rounds 5] [--json]

Two ranks of one thread each train a GPT in twelve layouts, in an order drawn anew in each round; what is measured is
the median over rounds. Prints the error of each, their median, and Kendall's tau of the two orders (1: the same).
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero3d
from zero3d.config import Config
from zero3d.dryrun.count import Subject, count
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.planner.hardware import Cluster, find
from zero3d.planner.run import Run
from zero3d.planner.timing import step_time
from zero3d.tensor.loss import next_token_loss

VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS = 4096, 256, 384, 8, 6
SAMPLES = 16
"""Of the global batch."""


@dataclass(frozen=True)
class Point:
    """A layout of two ranks. samples: of a micro-batch."""

    name: str
    samples: int
    settings: tuple[str, ...]


POINTS = [
    *(Point(f"dp2 level {level}", 8, (f"zero.level={level}",)) for level in range(4)),
    Point("dp2 level 1, 4 micro-batches", 2, ("zero.level=1",)),
    Point("dp2 level 2, 4 micro-batches", 2, ("zero.level=2",)),
    Point("dp2 level 3, 4 micro-batches", 2, ("zero.level=3",)),
    Point("dp2 level 2, recomputed", 8, ("zero.level=2", "recompute.mode=block")),
    Point("tp2", 16, ("parallel.tp=2",)),
    Point("tp2, 4 micro-batches", 4, ("parallel.tp=2",)),
    Point("pp2 1f1b, 4 micro-batches", 4, ("parallel.pp=2",)),
    Point("pp2 gpipe, 8 micro-batches", 2, ("parallel.pp=2", "parallel.schedule=gpipe")),
]


def gpt() -> nn.Module:
    return GPT(
        GPTConfig(vocabulary=VOCABULARY, sequence_length=LENGTH, width=WIDTH, layers=LAYERS, heads=HEADS, tied=False)
    )


def batch(samples: int) -> dict[str, Tensor]:
    tokens = torch.arange(samples * LENGTH).view(samples, LENGTH) % VOCABULARY
    return {"tokens": tokens, "targets": (tokens + 1) % VOCABULARY}


def config_of(point: Point, dtype: str) -> dict[str, Any]:
    tree = {"parallel": {"micro_batch": point.samples}, "precision": {"compute": dtype}}
    config = Config.load(tree, list(point.settings))
    return config.model_dump(exclude_unset=True)


def predicted(cluster: Cluster, point: Point, dtype: str) -> float:
    """Seconds."""
    given = Config.load({**config_of(point, dtype), "data": {"global_batch": SAMPLES}})
    config = given.resolved(2, native_bf16=False)
    subject = Subject(build=gpt, batch=batch, tokens=LENGTH)
    workload = count(subject, dtype=dtype, tp=config.parallel.tp, memory=False)
    return step_time(cluster, workload, Run.of(config)).seconds


def measured(rounds: int, dtype: str) -> dict[str, list[float]]:
    """Name -> seconds of each round."""
    engines = {}
    for point in POINTS:
        torch.manual_seed(0)
        engines[point.name] = zero3d.Engine(gpt(), next_token_loss, "adamw", config_of(point, dtype))
    found: dict[str, list[float]] = {point.name: [] for point in POINTS}
    for number in range(rounds + 2):
        for point in random.Random(number).sample(POINTS, len(POINTS)):
            engine = engines[point.name]
            mine = batch(SAMPLES // engine.dp_size)
            dist.barrier()
            began = time.perf_counter()
            engine.step(mine)
            dist.barrier()
            if number >= 2:
                found[point.name].append(time.perf_counter() - began)
    return found


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """(pairs of points in the same order - those in the other) / all."""
    agreed = [(one[0] - other[0]) * (one[1] - other[1]) > 0 for one, other in combinations(pairs, 2)]
    return (2 * sum(agreed) - len(agreed)) / len(agreed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cluster = find(str(options.profile))
    planned = {point.name: predicted(cluster, point, options.dtype) for point in POINTS}
    dist.init_process_group("gloo")
    seconds = measured(options.rounds, options.dtype)
    if dist.get_rank() == 0:
        tell(planned, seconds, as_json=options.json)
    dist.barrier()
    dist.destroy_process_group()


def tell(planned: Mapping[str, float], seconds: Mapping[str, Sequence[float]], *, as_json: bool) -> None:
    took = {name: statistics.median(times) for name, times in seconds.items()}
    errors = {name: planned[name] / took[name] - 1 for name in took}
    median = statistics.median(abs(error) for error in errors.values())
    tau = kendall([(planned[name], took[name]) for name in took])
    if as_json:
        print(
            json.dumps({"benchmark": "predicted", "planned": planned, "measured": took, "median": median, "tau": tau})
        )
        return
    for name in sorted(took, key=lambda name: took[name]):
        times = f"measured {took[name] * 1e3:8.1f} ms   planned {planned[name] * 1e3:8.1f} ms"
        print(f"{name:32} {times}   {errors[name]:+.1%}")
    print(f"median error {median:.1%}, Kendall's tau {tau:.2f}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
