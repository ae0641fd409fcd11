"""What this machine has: processors, memory, graphics processors. Reads the system; changes nothing."""

import os
import socket
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def cpu_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> int:
    """CUDA devices; only here, and only when it is asked, is torch loaded."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_memory() -> int | None:
    """Bytes that new processes can take: the system's, or fewer where a cgroup says so; None: unknown."""
    known = [one for one in (_system_memory(), _cgroup_memory()) if one is not None]
    return min(known) if known else None


def _system_memory() -> int | None:
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):
            return None
    values = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value}
    return int(values["MemAvailable"]) * 1024 if "MemAvailable" in values else None


def _cgroup_memory() -> int | None:
    """Version 2, then version 1; page cache that the kernel would give back counts as free."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int((CGROUP / limit_name).read_text(encoding="ascii"))
            used = int((CGROUP / used_name).read_text(encoding="ascii"))
            stat = (CGROUP / limit_name).with_name("memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):  # no such cgroup, or "max": no limit
            continue
        counts = dict(line.split() for line in stat.splitlines())
        cache = int(counts.get("inactive_file", counts.get("total_inactive_file", "0")))
        return max(limit - used + cache, 0)
    return None


def loopback_interface() -> str | None:
    """The name of the interface that reaches this machine alone."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
