"""Resident memory of a rank at its peak, level by level, beside torch's and DeepSpeed's own; prints one JSON line.

    python benchmarks/memory.py [--contenders zero0 ddp ...] [--medium] [--ranks 2]

Each contender trains in processes of its own (those of step.py; see there), twice: with the default allocator, and with
MALLOC_MMAP_THRESHOLD_=262144, with which large blocks go back to the system. `peak_mb` is what the rank that holds most
had resident at its peak in steps 3 to 5, beyond what it had with all libraries loaded and the groups of ranks formed.
`states_mb` are weights, gradients and optimizer state by formula (4 bytes each, of AdamW two): what cannot be saved.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import absent, arguments, batches, build, made, torchrun

CONTENDERS = ["zero0", "ddp", "zero1", "redundancy", "ds1", "zero2", "ds2", "fsdp2_kept", "zero3", "fsdp2", "ds3"]
ALLOCATORS = {"default": {}, "mapped": {"MALLOC_MMAP_THRESHOLD_": "262144"}}
STEPS = 3


def main() -> None:
    if "RANK" in os.environ:
        on_rank()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    parser.add_argument("--medium", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    peaks: dict[str, dict[str, float]] = {}
    numel = 0
    for name in options.contenders:
        for allocator, settings in ALLOCATORS.items() if not absent(name) else ():
            found = in_processes(name, options, settings)
            peaks.setdefault(allocator, {})[name] = found["peak_mb"]
            numel = found["parameters"]
            print(f"{name}, {allocator} allocator: {found['peak_mb']} MB", file=sys.stderr, flush=True)
    print(
        json.dumps(
            {
                "benchmark": "memory",
                "parameters": numel,
                "ranks": options.ranks,
                "torch": torch.__version__,
                "peak_mb": peaks,
                "states_mb": {f"zero{level}": states_mb(numel, level, options.ranks) for level in range(4)},
            }
        )
    )


def states_mb(numel: int, level: int, ranks: int) -> float:
    parts = [1 if level < first else ranks for first in (3, 2, 1, 1)]  # weights, gradients, two moments
    return round(sum(4 * numel / part for part in parts) / 1e6, 1)


def in_processes(name: str, options: argparse.Namespace, settings: dict[str, str]) -> dict[str, Any]:
    size = ["--medium"] if options.medium else []
    words, environment = torchrun(options.ranks, __file__, "--contenders", name, *size)
    done = subprocess.run(
        words, env=environment | settings, check=True, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    )
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def on_rank() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if options.contenders[0].startswith("ds"):
        import deepspeed  # noqa: F401  Its own size is not the training's.
    dist.barrier()
    floor = status_mb("VmRSS")
    step = made(options.contenders[0], options)
    for number in range(2):
        step(batches(number, options)[1])
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # The peak from here on.
    for number in range(2, 2 + STEPS):
        step(batches(number, options)[1])
    peak = torch.tensor(status_mb("VmHWM") - floor)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        numel = sum(parameter.numel() for parameter in build(options).parameters())
        print(json.dumps({"peak_mb": round(float(peak), 1), "parameters": numel}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def status_mb(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
