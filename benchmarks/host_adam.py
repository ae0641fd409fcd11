"""The host's AdamW beside torch's own, in one interleaved run: bf16 gradients in, bf16 weights out.

    python benchmarks/host_adam.py [--millions 50 200] [--threads 1 2] [--rounds 7] [--json]

`ours` is `HostAdamW` on memory as zero3d makes it, mapped with large pages; the others have memory as torch gives it.
`fused_casts` and `foreach_casts` widen the gradient into an fp32 buffer that is kept, make torch's step and narrow the
weights; `fused_fp32` is torch's step alone, on fp32 gradients: it moves the same 28 bytes a parameter, and widens
nothing. Names that end in `_mapped` are the same on memory like ours. `copy` is what the machine's copies would allow:
bytes that a copy of fp32 reads and writes, divided by 28. DeepSpeed's CPU Adam joins where it can be imported (on its
own bf16 weights, with fp32 moments).

In each round every contender makes one step, in an order drawn anew; rates are medians over rounds, and so are
ratios, each of two steps of the same round. torch's contenders have `threads` by torch.set_num_threads. Where others
use the machine as well, `--clock cpu` with one thread says more than wall time.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero3d.mapped import fresh
from zero3d.offload.adamw import HostAdamW, Workers

CPU = torch.device("cpu")
BYTES = 28
"""A parameter's traffic: gradient 2, weight and moments 12 in and 12 out, weight 2."""
NUM_TENSORS = 16
Step = Callable[[], object]


def main() -> None:
    options = arguments()
    results = [result(millions, threads, options) for millions in options.millions for threads in options.threads]
    if options.json:
        print(json.dumps({"benchmark": "host_adam", "torch": torch.__version__, "results": results}))
    else:
        for one in results:
            print(table(one), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="+", default=[50, 200], help="parameters")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: the process' seconds")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


class Buffers:
    """What all contenders share, each in `NUM_TENSORS` slices that start at multiples of 64 elements."""

    def __init__(self, numel: int, *, mapped: bool) -> None:
        self.numel = numel
        self.size = -(-numel // NUM_TENSORS // 64) * 64

        def made(dtype: torch.dtype) -> Tensor:
            return fresh(numel, dtype, CPU) if mapped else torch.zeros(numel, dtype=dtype)

        self.weight, self.exp_avg, self.exp_avg_sq, self.wide = (made(torch.float32) for _ in range(4))
        self.gradient, self.out = (made(torch.bfloat16) for _ in range(2))
        self.weight.normal_()
        self.gradient.normal_()
        self.wide.copy_(self.gradient)
        self.exp_avg_sq.fill_(0.01)

    def slices(self, whole: Tensor) -> Sequence[Tensor]:
        return whole.split(self.size)

    def optimizer(self, **options: Any) -> torch.optim.AdamW:
        made = torch.optim.AdamW(self.slices(self.weight), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **options)
        for tensor, first, second in zip(
            made.param_groups[0]["params"], self.slices(self.exp_avg), self.slices(self.exp_avg_sq)
        ):
            made.state[tensor] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
        return made


def ours(buffers: Buffers, threads: int) -> Step:
    torch.set_num_threads(1)  # Its threads are its own, as in a rank that the launcher starts.
    host = HostAdamW(buffers.optimizer(fused=True), Workers(threads))
    gradients, outs = buffers.slices(buffers.gradient), buffers.slices(buffers.out)

    def step() -> None:
        torch.set_num_threads(1)
        host.step(gradients, 1.0, outs)

    return step


def plain(buffers: Buffers, **options: Any) -> Step:
    optimizer = buffers.optimizer(**options)
    for tensor, gradient in zip(optimizer.param_groups[0]["params"], buffers.slices(buffers.wide)):
        tensor.grad = gradient
    return optimizer.step


def with_casts(buffers: Buffers, **options: Any) -> Step:
    update = plain(buffers, **options)

    def step() -> None:
        buffers.wide.copy_(buffers.gradient)
        update()
        buffers.out.copy_(buffers.weight)

    return step


def deepspeed(buffers: Buffers) -> Step | str:
    """Why not, where it cannot be run."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameters = [torch.nn.Parameter(part) for part in buffers.slices(buffers.out)]
        optimizer = DeepSpeedCPUAdam(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)
    except Exception as error:
        return f"absent ({type(error).__name__})"
    for parameter, gradient in zip(parameters, buffers.slices(buffers.gradient)):
        parameter.grad = gradient
    return lambda: optimizer.step()


def result(millions: float, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    buffers, mapped = (Buffers(int(millions * 1e6), mapped=kind) for kind in (False, True))
    contenders: dict[str, Step] = {
        "ours": ours(mapped, threads),
        "fused_casts": with_casts(buffers, fused=True),
        "foreach_casts": with_casts(buffers, foreach=True),
        "fused_fp32": plain(buffers, fused=True),
        "fused_casts_mapped": with_casts(mapped, fused=True),
        "fused_fp32_mapped": plain(mapped, fused=True),
        "copy": lambda: buffers.exp_avg.copy_(buffers.weight),
    }
    rival = deepspeed(buffers)
    absent = {"deepspeed": rival} if isinstance(rival, str) else {}
    if not isinstance(rival, str):
        contenders["deepspeed"] = rival
    seconds = measure(contenders, threads, options)
    moved = {name: 8 / BYTES if name == "copy" else 1.0 for name in contenders}

    def ratio(other: str) -> float:
        return round(
            statistics.median(b / a / moved[other] for a, b in zip(seconds["ours"], seconds[other], strict=True)), 3
        )

    rates = {name: buffers.numel * moved[name] / statistics.median(times) for name, times in seconds.items()}
    return {
        "parameters": buffers.numel,
        "threads": threads,
        "rounds": options.rounds,
        "clock": options.clock,
        "millions_per_second": {name: round(rate / 1e6, 1) for name, rate in rates.items()},
        "ours_over": {name: ratio(name) for name in contenders if name != "ours"},
        **absent,
    }


def measure(contenders: dict[str, Step], threads: int, options: argparse.Namespace) -> dict[str, list[float]]:
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds + 1):
        for name in random.Random(number).sample(names, len(names)):
            torch.set_num_threads(threads)
            began = clock()
            contenders[name]()
            if number:  # Pages are first touched in the round before.
                seconds[name].append(clock() - began)
    return seconds


def table(one: dict[str, Any]) -> str:
    threads, rounds, clock = one["threads"], one["rounds"], one["clock"]
    lines = [f"{one['parameters'] / 1e6:.0f} M parameters, {threads} threads, {rounds} rounds, {clock} time"]
    for name, rate in one["millions_per_second"].items():
        against = f"   ours is {one['ours_over'][name]:.2f} of it" if name in one["ours_over"] else ""
        lines.append(f"  {name:18} {rate:8.1f} M/s{against}")
    if "deepspeed" in one:
        lines.append(f"  {'deepspeed':18} {one['deepspeed']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
