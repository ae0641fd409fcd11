"""Accelerate and zero3d must mean the same processes and the same kind of device."""

import torch

from zero3d.comm.mesh import ranks_started
from zero3d.errors import UsageError


def refuse_world(processes: int, device: torch.device, cpu: str) -> None:
    """Raises `UsageError` where Accelerate has found other `processes`, or another `device`, than zero3d will.

    cpu: the argument that makes Accelerate use CPUs, and join processes without GPUs
    """
    started = ranks_started()
    if started != processes:
        raise UsageError(
            f"{started} processes were started, and Accelerate knows of {processes}: each would have all of the data",
            hint=f"Start with torchrun; without GPUs pass {cpu}, so that Accelerate joins the processes.",
        )
    if torch.cuda.is_available() != (device.type == "cuda"):
        raise UsageError(
            f"Accelerate works on {device}, and zero3d on {'GPUs' if torch.cuda.is_available() else 'CPUs'}",
            hint=f"Leave {cpu} out; to train on CPUs where there are GPUs, set CUDA_VISIBLE_DEVICES to nothing.",
        )
