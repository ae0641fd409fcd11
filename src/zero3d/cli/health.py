"""What `zero3d doctor` finds on this machine: versions, back ends, processors, memory, interfaces, disks. Reads the
system and starts nothing; torch is loaded here, as what it was built with is among what is to be known."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from zero3d.cli import machine
from zero3d.comm import machines
from zero3d.errors import ConfigError
from zero3d.offload.machine import Limit, of_machine, of_process

PACKAGES: Final = ("zero3d", "torch", "numpy", "pydantic", "rich", "safetensors", "typer")
OPTIONAL: Final = {
    "transformers": "hf",
    "accelerate": "hf",
    "tokenizers": "tokenizers",
    "tensorboard": "tensorboard",
    "plotly": "report",
    "fsspec": "remote",
}
"""Package -> the extra that brings it."""
COMPILERS: Final = ("cc", "gcc", "g++", "clang")
SHARED_MEMORY: Final = Path("/dev/shm")
CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device of this machine; bytes."""

    name: str
    memory: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known. Bytes of memory and disks; None: unknown, or not there."""

    python: tuple[int, int, int]
    system: str
    versions: dict[str, str]
    torch_error: str = ""
    back_ends: tuple[str, ...] = ()
    cuda: str | None = None
    cores: int
    cpu_quota: float | None = None
    native_bf16: bool | None = None
    memory: Limit | None = None
    process_memory: Limit | None = None
    gpus: tuple[Gpu, ...] = ()
    interfaces: dict[str, tuple[str, ...]] = field(default_factory=dict)
    loopback: str | None = None
    across: str = ""
    across_problem: str = ""
    shared_memory: int | None = None
    temporary: int | None = None
    here: int | None = None
    writable: bool = True
    compiler: str | None = None


def look(environment: Mapping[str, str]) -> Facts:
    """`environment`: where a user may have said which interface is meant."""
    torch_error, back_ends, cuda, native_bf16, gpus = _torch()
    across, problem = _across(environment)
    return Facts(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={name: found for name in (*PACKAGES, *OPTIONAL) if (found := _version(name))},
        torch_error=torch_error,
        back_ends=back_ends,
        cuda=cuda,
        cores=machine.cpu_cores(),
        cpu_quota=_cpu_quota(),
        native_bf16=native_bf16,
        memory=of_machine(),
        process_memory=of_process(),
        gpus=gpus,
        interfaces=machines.interface_addresses(),
        loopback=machine.loopback_interface(),
        across=across,
        across_problem=problem,
        shared_memory=_free(SHARED_MEMORY),
        temporary=_free(Path(tempfile.gettempdir())),
        here=_free(Path.cwd()),
        writable=os.access(Path.cwd(), os.W_OK),
        compiler=next((found for name in COMPILERS if (found := shutil.which(name))), None),
    )


def _torch() -> tuple[str, tuple[str, ...], str | None, bool | None, tuple[Gpu, ...]]:
    """Why it cannot be loaded, or what it has."""
    try:
        import torch

        from zero3d.comm.mesh import back_ends
        from zero3d.precision import native_bf16
    except (ImportError, OSError, RuntimeError) as error:  # A library of its own that is missing or broken.
        return f"{type(error).__name__}: {error}", (), None, None, ()
    gpus = []
    for index in range(machine.gpus()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(name=torch.cuda.get_device_name(index), memory=total, free=free))
    return "", back_ends(), torch.version.cuda, native_bf16(), tuple(gpus)


def _across(environment: Mapping[str, str]) -> tuple[str, str]:
    """By which interface ranks of several machines would reach each other, or why nobody can tell."""
    if machines.GLOO in environment:
        told: Mapping[str, str] = environment
    else:  # As torchrun fills it for ranks of two machines.
        told = {**environment, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    try:
        added = machines.interfaces(told)
    except ConfigError as error:
        return "", str(error)
    return environment.get(machines.GLOO) or added.get(machines.GLOO, ""), ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_quota() -> float | None:
    """Cores that a container may use at a time; None: no limit."""
    try:
        quota, period = CPU_MAX.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _free(place: Path) -> int | None:
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None
