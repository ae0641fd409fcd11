"""How fast the host updates parameters, and how fast they get there."""

import torch

from zero3d.calibrate.bench import Bench
from zero3d.offload.adamw import HostAdamW, Workers


def update(bench: Bench, elements: int) -> float:
    """Parameters/s of one rank's threads, by the optimizer of offload: bf16 gradients in, bf16 weights out."""
    master = torch.full((elements,), 0.5)
    gradient, out = (torch.full((elements,), 0.01, dtype=torch.bfloat16) for _ in range(2))
    workers = Workers(torch.get_num_threads())
    try:
        optimizer = HostAdamW(torch.optim.AdamW([master], lr=1e-6, fused=True), workers)
        return elements / bench.seconds(lambda: optimizer.step([gradient], 1.0, [out]))
    finally:
        workers.close()


def copy(bench: Bench, elements: int) -> float:
    """Bytes/s from the device into memory of the host that is as offload has it: pinned where there is a GPU."""
    source = torch.full((elements,), 0.5, device=bench.device)
    there = torch.zeros(elements, pin_memory=bench.device.type == "cuda")
    return 4 * elements / bench.seconds(lambda: there.copy_(source, non_blocking=True))
