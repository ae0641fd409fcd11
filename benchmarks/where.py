"""Where the time of a step goes, for the contenders of step.py; prints a table.

    python benchmarks/where.py [--contenders zero0 ddp ...] [--rounds 6] [--medium] [--ranks 2]

Milliseconds of a step of rank 0, under torch's profiler, which makes everything between two kernels dearer:

    products, optimizer, moving, other   kernels: matrix products, the update, what copies, adds or fills, all others
    Python                               the rest of what the main thread's processor does: Python, autograd, hooks
    blocked                              the main thread waits: for other ranks, or for a processor
    others                               processor time of the process' other threads: gloo's sending and receiving

The first five add up to the step. Contenders take turns, in an order drawn anew each round; these are medians.
"""

import argparse
import random
import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from step import MEDIUM, SMALL, WARM_UP, Batch, Step, absent, batches, made, start_ranks
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::addbmm", "aten::baddbmm"),
    "optimizer": ("aten::_fused_adamw_", "aten::_fused_adam_"),
    "moving": (
        "aten::copy_",
        "aten::_foreach_copy_",
        "aten::_foreach_add_",
        "aten::add_",
        "aten::cat",
        "aten::clone",
        "aten::div_",
        "aten::fill_",
        "aten::zero_",
        "aten::split_with_sizes_copy",
    ),
}
COLUMNS = (*KINDS, "other", "Python", "blocked", "step", "others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=["zero0", "ddp", "zero1", "zero3", "fsdp2", "apart"])
    parser.add_argument("--medium", action="store_true", help="a model of 88 million parameters; else of 10 million")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    vars(options).update(MEDIUM if options.medium else SMALL)
    start_ranks(options.ranks)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    contenders = {name: made(name, options) for name in options.contenders if not absent(name)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(options.rounds + WARM_UP):
        whole, mine = batches(number, options)
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            dist.barrier()
            parts = one_step(contenders[name], whole if name.startswith("alone") else mine)
            dist.barrier()
            if number >= WARM_UP:
                found[name].append(parts)
    if dist.get_rank() == 0:
        print(table(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def one_step(step: Step, batch: Batch) -> dict[str, float]:
    """Milliseconds by column."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        began, main_began, all_began = time.perf_counter(), time.thread_time(), time.process_time()
        step(batch)
        wall = time.perf_counter() - began
        main, everyone = time.thread_time() - main_began, time.process_time() - all_began
    kernels = {one.key: one.self_cpu_time_total / 1e3 for one in profiled.key_averages() if one.key[:6] == "aten::"}
    parts = {kind: sum(kernels.pop(name, 0.0) for name in names) for kind, names in KINDS.items()}
    parts["other"] = sum(kernels.values())
    parts["Python"] = max(main * 1e3 - sum(parts.values()), 0.0)
    parts["blocked"] = (wall - main) * 1e3
    parts["step"], parts["others"] = wall * 1e3, (everyone - main) * 1e3
    return parts


def table(found: Mapping[str, list[dict[str, float]]]) -> str:
    lines = ["| | " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * len(COLUMNS)]
    for name, steps in found.items():
        medians = [statistics.median(one[column] for one in steps) for column in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(f"{one:.0f}" for one in medians) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
