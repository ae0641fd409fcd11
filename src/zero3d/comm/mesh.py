"""The ranks of a run and the axes they form."""

import atexit
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from zero3d.comm import machines
from zero3d.comm.attempt import MEET, agree_on_attempt
from zero3d.comm.guarded import in_time
from zero3d.comm.hybrid_axis import HybridAxis
from zero3d.comm.process_axis import ProcessAxis, lookout_of_process
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.comm.solo_axis import SoloAxis
from zero3d.comm.texts import everyones_text
from zero3d.contracts import Axis, Watcher
from zero3d.errors import ConfigError, RankFailedError
from zero3d.layout import AXES, Layout

MORE = 5.0
"""Seconds beside the time-out within which ranks meet."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Where this process stands.

    hybrid: dp in groups, where ZeRO shards within each; model: the ranks that share one replica, pp outside tp;
    everyone: all ranks. What is told over the last two is not counted. on_paper: nobody has started the other ranks.
    hosts: the name of each rank's machine; empty where they have not told.
    """

    layout: Layout
    rank: int
    device: torch.device
    axes: dict[str, RecordedAxis]
    model: Axis
    everyone: Axis
    hybrid: HybridAxis | None = None
    on_paper: bool = False
    hosts: tuple[str, ...] = ()

    @property
    def sharding(self) -> Axis:
        """What ZeRO shards over: dp, or this rank's group of it."""
        return self.hybrid or self.axes["dp"]

    @property
    def placement(self) -> str:
        """What the user should know of which ranks share a machine; empty if nothing."""
        return machines.placement(self.layout, self.hosts) if self.hosts else ""

    def enter_step(self, step: int) -> None:
        """Errors of ranks that diverge from now on name step `step`; 0: none."""
        lookout_of_process().step = step

    def watch(self, watcher: Watcher) -> None:
        """From now on it is told of all calls on the axes."""
        for axis in self.axes.values():
            axis.watcher = watcher

    @property
    def counts_norms(self) -> bool:
        """Whether norms of this rank's shards count: every group holds the same ones, and the first one's count."""
        return self.hybrid is None or self.hybrid.group == 0


def back_ends() -> tuple[str, ...]:
    """Those that this torch is built with, of the ones that ranks here use."""
    if not dist.is_available():
        return ()
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return tuple(name for name, there in built.items() if there)


def ranks_started() -> int:
    """How many ranks this process was started with: the open process group's, the launcher's, or 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def open_mesh(layout: Layout, timeout: timedelta, replicas: int = 1) -> Mesh:
    """Joins the ranks that were started (by torchrun, by `zero3d train`, or by an open process group).

    `replicas`: the number of groups within which ZeRO shards; divides dp. ConfigError: other ranks were started than
    the layout wants; see `machines.interfaces`.
    """
    started = ranks_started()
    if layout.world != started:
        raise ConfigError(
            f"the layout dp {layout.dp} x tp {layout.tp} x pp {layout.pp} wants {layout.world} ranks, "
            f"{started} {'was' if started == 1 else 'were'} started",
            hint=f'Start {layout.world} ranks (torchrun --nproc-per-node {layout.world}), or set parallel.dp = "auto".',
        )
    device = _device()
    limit = timeout.total_seconds() + MORE
    if started > 1 and not dist.is_initialized():
        # torch reads it from there alone, whenever it makes a group.
        os.environ.update(machines.interfaces(os.environ))
        in_time(limit, lambda: _meet(timeout, device), "the meeting of all ranks")
        atexit.register(_part)
    rank = dist.get_rank() if dist.is_initialized() else 0
    axes: dict[str, Axis] = {name: SoloAxis() for name in AXES}
    if started > 1:
        axes |= in_time(limit, lambda: _axes_of(layout, timeout, device), "the forming of the groups of ranks")
    recorded = {name: RecordedAxis(axis, name=name) for name, axis in axes.items()}
    model = axes["tp"] if layout.pp == 1 else axes["pp"]
    if layout.tp > 1 and layout.pp > 1:
        model = _mine(layout.model_groups(), timeout, device)
    only = [axis for axis in axes.values() if axis.size == started]
    world = dist.group.WORLD
    everyone = ProcessAxis(world, device) if world is not None and not only else only[0]
    hybrid = _grouped(layout, replicas, timeout, device, recorded["dp"]) if replicas > 1 else None
    hosts = tuple(everyones_text(socket.gethostname(), everyone, device, "names of machines"))
    return Mesh(
        layout=layout,
        rank=rank,
        device=device,
        axes=recorded,
        model=model,
        everyone=everyone,
        hybrid=hybrid,
        hosts=hosts,
    )


def _meet(timeout: timedelta, device: torch.device) -> None:
    """Opens the process group of the ranks that the launcher has started."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Of this thread.
    # Once a process: ranks that met, parted and meet again find what they left at the store.
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    except RuntimeError as error:
        where = str(error).splitlines()[0][:200]
        raise RankFailedError("the store where ranks meet cannot be reached", where=where, hint=MEET) from None
    attempt = PrefixStore(f"attempt {agree_on_attempt(store, rank, size, timeout)}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout, store=attempt, rank=rank, world_size=size)


def _axes_of(layout: Layout, timeout: timedelta, device: torch.device) -> dict[str, Axis]:
    """The axes that have several ranks. Not by a DeviceMesh, whose groups wait for half an hour whatever `timeout`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found: dict[str, Axis] = {}
    for name in AXES:
        lines = tuple(sorted({layout.peers(rank, name) for rank in range(layout.world)}))
        if len(lines) == 1 and (world := dist.group.WORLD) is not None:
            found[name] = ProcessAxis(world, device)
        elif getattr(layout, name) > 1:
            found[name] = _mine(lines, timeout, device)
    return found


def _grouped(
    layout: Layout, replicas: int, timeout: timedelta, device: torch.device, everyone: RecordedAxis
) -> HybridAxis:
    """dp in `replicas` groups. What goes within and across groups counts as calls of dp."""
    within, across = (
        RecordedAxis(_mine(members, timeout, device), everyone)
        for members in (layout.groups(replicas), layout.counterparts(replicas))
    )
    return HybridAxis(within, across, everyone, device)


def _mine(members: tuple[tuple[int, ...], ...], timeout: timedelta, device: torch.device) -> Axis:
    """The group that this rank is in. Every rank makes every process group, in one order."""
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in members], timeout=timeout)
    return ProcessAxis(group, device)


def mesh_over(group: Any) -> Mesh:
    """The ranks of a torch ProcessGroup, or of an `Axis`, as dp alone."""
    device = _device()
    axis: Axis = group
    if isinstance(group, dist.ProcessGroup):
        axis = ProcessAxis(group, device) if dist.get_world_size(group) > 1 else SoloAxis()
    axes: dict[str, RecordedAxis] = {
        name: RecordedAxis(axis if name == "dp" else SoloAxis(), name=name) for name in AXES
    }
    layout = Layout(dp=axis.size)
    return Mesh(layout=layout, rank=axis.index, device=device, axes=axes, model=SoloAxis(), everyone=axis)


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
