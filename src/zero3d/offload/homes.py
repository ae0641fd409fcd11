"""Which buckets are offloaded, whether the machine has the memory for them, and the parts that do it, put together."""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero3d.comm.bucket import Bucket
from zero3d.comm.done import DONE
from zero3d.comm.mesh import Mesh
from zero3d.comm.streams import Staging
from zero3d.comm.texts import everyones_text
from zero3d.config import Config
from zero3d.contracts import Axis, Home, Pending, Replica, Store, Watcher
from zero3d.errors import OutOfSpaceError, UsageError, Zero3dError
from zero3d.mapped import kept_copy
from zero3d.offload import budget, machine
from zero3d.offload.adamw import Workers
from zero3d.offload.disk import StateFiles
from zero3d.offload.home import HostHome, are_masters
from zero3d.offload.memory import HOST, FileMemory, HostMemory, Memory
from zero3d.offload.queues import Queues, Seconds
from zero3d.offload.update import OffloadedOptimizer
from zero3d.optim.assignment import Assignment
from zero3d.optim.probe import state_per_element
from zero3d.optim.sharded import ShardedOptimizer
from zero3d.precision import Dtypes
from zero3d.zero.beside import Beside


class OnDevice(Beside):
    """The homes of a run without offload."""

    notice = ""
    machines: Sequence[budget.MachineNeed] = ()
    kinds: tuple[str, ...] = ()

    def optimizer(self, assignment: Assignment, replica: Replica, axis: Axis) -> ShardedOptimizer:
        return ShardedOptimizer(assignment, replica.shards, axis)

    def watch(self, watcher: Watcher) -> None:
        return None

    def take_seconds(self) -> Seconds | None:
        return None

    def held(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def close(self) -> None:
        return None


class HostStore:
    """The `Store` of weights on the host."""

    kind = "host"

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def keep(self, first: Tensor, dtype: torch.dtype) -> Tensor:
        return kept_copy(first.to(HOST), dtype)

    def lift(self, part: Tensor, out: Tensor, label: str) -> Pending:
        if self._queues.closed:
            out.copy_(part)
            return DONE
        return self._queues.up.put(lambda: out.copy_(part, non_blocking=True), label)


class Offloaded:
    """The `Homes` of a run with offload. `moments`: tensors of a shard's size that the optimizer keeps."""

    kinds = ("host", "disk", "staging")

    def __init__(self, config: Config, mesh: Mesh, dtypes: Dtypes, moments: int) -> None:
        self._config = config
        self._options = config.offload
        self._mesh = mesh
        self._dtypes = dtypes
        self._moments = moments
        self._queues = Queues(mesh.device, late=mesh.on_paper)
        self._weights_here = self._options.parameters == "host"
        self.store: Store | None = HostStore(self._queues) if self._weights_here else None
        self.notice = ""
        self.machines: Sequence[budget.MachineNeed] = ()
        self._away: frozenset[Bucket] = frozenset()
        self._home: HostHome | None = None
        self._memory: Memory = HostMemory()
        self._workers = Workers(1)
        self._up = self._down = Staging(0, mesh.device)

    def plan(self, buckets: Sequence[Bucket], axis: Axis, whole: bool) -> None:
        self._away = frozenset(self._chosen(buckets, axis.size, whole))
        widths = {bucket: self._widths(bucket, axis.size, whole) for bucket in self._away}
        others = [bucket for bucket in buckets if bucket not in self._away] if self._weights_here else []
        need = budget.need(
            [(bucket.shard_numel, widths[bucket]) for bucket in self._away],
            home="disk" if self._options.optimizer == "disk" else "host",
            parameters=self._options.parameters,
            delayed=self._options.delayed_update > 0,
            pins=self._mesh.device.type == "cuda",
            other_weights=sum(bucket.shard_numel * self._compute(bucket).itemsize for bucket in others),
        )
        self._agree(need)
        down = max((widths[bucket].down * bucket.shard_numel for bucket in self._away), default=0)
        up = max((widths[bucket].weight * bucket.shard_numel for bucket in self._away), default=0)
        self._down = Staging(down, self._mesh.device)
        self._up = Staging(0 if self._weights_here else up, self._mesh.device)
        self._home = HostHome(
            self._queues,
            self._down,
            self._memory,
            self._mesh.device,
            delays=self._options.delayed_update > 0,
            weights_here=self._weights_here,
        )

    def of(self, bucket: Bucket) -> Home | None:
        return self._home if bucket in self._away else None

    def optimizer(self, assignment: Assignment, replica: Replica, axis: Axis) -> OffloadedOptimizer:
        return OffloadedOptimizer(
            assignment,
            replica.by_use,
            axis,
            queues=self._queues,
            staging=self._up,
            memory=self._memory,
            device=self._mesh.device,
            workers=self._workers,
            delay=self._options.delayed_update,
            weights_here=self._weights_here,
        )

    def watch(self, watcher: Watcher) -> None:
        """From now on it is told of all that the queues do."""
        self._queues.watch(watcher)

    def take_seconds(self) -> Seconds:
        return self._queues.take_seconds()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        for staging in (self._down, self._up):
            for buffer in staging.buffers:
                yield "staging", buffer
        yield from self._workers.held()

    def close(self) -> None:
        self._queues.close()
        self._workers.close()
        self._memory.close()

    def _compute(self, bucket: Bucket) -> torch.dtype:
        found: torch.dtype = getattr(torch, bucket.dtype)
        return found

    def _widths(self, bucket: Bucket, ranks: int, whole: bool) -> budget.HostWidths:
        compute = self._compute(bucket)
        held, wire = self._dtypes.held(compute), self._dtypes.wire(compute)
        in_memory, delays = self._options.optimizer == "host", self._options.delayed_update > 0
        same = self._weights_here and are_masters(compute, in_memory=in_memory, delays=delays)
        return budget.HostWidths(
            weight=compute.itemsize,
            gradient=held.itemsize,
            down=(wire if ranks == 1 and not whole else held).itemsize,
            moments=self._moments,
            apart=not same,
        )

    def _chosen(self, buckets: Sequence[Bucket], ranks: int, whole: bool) -> list[Bucket]:
        """Those that leave the device."""
        trained = [bucket for bucket in buckets if bucket.trainable]
        if not trained or self._options.fraction != "auto":
            fraction = 1.0 if self._options.fraction == "auto" else self._options.fraction
            chosen = budget.choose([bucket.shard_numel for bucket in trained], fraction)
            return [trained[index] for index in chosen]
        compute = self._compute(trained[0])
        parts = ranks if self._config.zero.level < 3 else 1  # of a bucket's weights that the device keeps
        weights = 0 if self._weights_here else compute.itemsize * parts
        gradients = self._dtypes.held(compute).itemsize * (ranks if whole else 1)
        state = 4 * self._moments + (4 if compute != torch.float32 else 0)
        frozen = [bucket for bucket in buckets if not bucket.trainable and not self._weights_here]
        chosen = budget.choose(
            [bucket.shard_numel for bucket in trained],
            "auto",
            offloaded=weights + (gradients if whole else 0),
            kept=weights + gradients + state,
            budget=(self._options.device_mb or 0) * 1e6,
            besides=sum(self._compute(one).itemsize * one.shard_numel * parts for one in frozen),
        )
        return [trained[index] for index in chosen]

    def _agree(self, need: budget.HostNeed) -> None:
        """Raises on every rank where a machine lacks the memory, or a rank its files. Collective."""
        # A rehearsal is of other machines than this one.
        together, alone = (None, None) if self._mesh.on_paper else (machine.of_machine(), machine.of_process())
        mine = {
            "machine": socket.gethostname(),
            "need": asdict(need),
            "free": None if together is None else list(together),
            "own": None if alone is None else list(alone),
        }
        told = [json.loads(text) for text in self._everyones(json.dumps(mine), "host memory of ranks")]
        by_machine: dict[str, dict[int, Any]] = {}
        for rank, one in enumerate(told):
            by_machine.setdefault(one["machine"], {})[rank] = one
        machines = []
        for ranks in by_machine.values():
            needs = {rank: budget.HostNeed(**one["need"]) for rank, one in ranks.items()}
            free = [one["free"] for one in ranks.values() if one["free"]]
            if free:
                budget.check(needs, *min(free))
            for rank, one in ranks.items():
                if one["own"]:
                    budget.check({rank: needs[rank]}, *one["own"])
            available, limit_name = min(free) if free else (None, "")
            machines.append(budget.MachineNeed(needs=needs, available=available, limit_name=limit_name))
        self.machines = tuple(machines)
        texts = [budget.report(one.needs, one.available, one.limit_name) for one in machines]
        self.notice = "; ".join(dict.fromkeys(texts))
        ranks_here = len(by_machine[socket.gethostname()])
        self._workers = Workers(_threads(self._options.threads, ranks_here))
        self._memory = HostMemory("disk" if self._options.optimizer == "disk" else "host")
        if self._options.optimizer == "disk" and not self._mesh.on_paper:
            # Ranks of a machine usually share the disk.
            here = by_machine[socket.gethostname()].values()
            self._memory = self._files(sum(one["need"]["disk"] for one in here))

    def _files(self, needed: int) -> Memory:
        """Files of this rank. An error of one rank is everyone's."""
        found, problem = None, ""
        try:
            found = FileMemory(StateFiles(Path(self._options.folder or "."), self._mesh.rank, needed))
        except Zero3dError as error:
            message = f"rank {self._mesh.rank}: {error.message}"
            problem = json.dumps([isinstance(error, OutOfSpaceError), message, error.where, error.hint])
        told = [text for text in self._everyones(problem, "whether there is room on disk") if text]
        if told:
            full, message, where, hint = json.loads(told[0])
            raise (OutOfSpaceError if full else UsageError)(message, where=where, hint=hint)
        assert found is not None
        return found

    def _everyones(self, mine: str, label: str) -> list[str]:
        return everyones_text(mine, self._mesh.everyone, self._mesh.device, label)


AnyHomes = OnDevice | Offloaded
AnyOptimizer = ShardedOptimizer | OffloadedOptimizer


def homes_for(config: Config, mesh: Mesh, dtypes: Dtypes, assignment: Assignment) -> AnyHomes:
    """What a resolved configuration asks for."""
    if config.offload.optimizer == "device":
        return OnDevice()
    rules = dict.fromkeys(assignment.rule_of.values())
    moments = max((state_per_element(rule.build) for rule in rules), default=0)
    return Offloaded(config, mesh, dtypes, moments)


def _threads(asked: int | str | None, ranks: int) -> int:
    """Of one of the `ranks` of this machine."""
    if isinstance(asked, int):
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // ranks, 1)
