"""How much memory this process has at this moment."""

import mmap
from pathlib import Path

import torch

STATM = Path("/proc/self/statm")


def memory_now(device: torch.device) -> int:
    """Bytes: allocated on a GPU, or in memory on a CPU without what other processes may share, such as a mapped token
    file; 0 where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        _, resident, shared, *_ = map(int, STATM.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * mmap.PAGESIZE
