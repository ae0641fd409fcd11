"""The ranks of a run and the axes they form."""

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zero3d.comm.process_axis import ProcessAxis
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.comm.solo_axis import SoloAxis
from zero3d.contracts import Axis
from zero3d.errors import ConfigError
from zero3d.layout import AXES, Layout


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Where this process stands."""

    layout: Layout
    rank: int
    device: torch.device
    axes: dict[str, RecordedAxis]


def ranks_started() -> int:
    """How many ranks this process was started with: the open process group's, the launcher's, or 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def open_mesh(layout: Layout, timeout: timedelta) -> Mesh:
    """Joins the ranks that were started (by torchrun, by `zero3d train`, or by an open process group)."""
    started = ranks_started()
    if layout.world != started:
        raise ConfigError(
            f"the layout dp {layout.dp} x tp {layout.tp} x pp {layout.pp} wants {layout.world} ranks, "
            f"{started} {'was' if started == 1 else 'were'} started",
            hint=f'Start {layout.world} ranks (torchrun --nproc-per-node {layout.world}), or set parallel.dp = "auto".',
        )
    device = _device()
    if started > 1 and not dist.is_initialized():
        # Once a process: ranks that met, parted and meet again find what they left at the store.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        atexit.register(_part)
    rank = dist.get_rank() if dist.is_initialized() else 0
    axes: dict[str, Axis] = {name: SoloAxis() for name in AXES}
    if started > 1:
        mesh = init_device_mesh(device.type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
        for name in AXES:
            if getattr(layout, name) > 1:
                axes[name] = ProcessAxis(mesh.get_group(name), device)
    recorded = {name: RecordedAxis(axis) for name, axis in axes.items()}
    return Mesh(layout=layout, rank=rank, device=device, axes=recorded)


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
