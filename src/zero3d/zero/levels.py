"""What the levels are. `replica_for` is the one place that reads the number.

    level   weights      optimizer over dp   gradients are held
    0       whole        no                  whole
    1       published    yes                 whole (1/dp when reduced every micro-batch)
    2       published    yes                 1/dp (whole when reduced once a step)
    3       gathered     yes                 1/dp (whole when reduced once a step)

Levels 1 and 2 differ in when they reduce unless told otherwise: once a step, or once a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero3d import params
from zero3d.blueprint import Blueprint
from zero3d.comm.bucket import Asking, Bucket, Want, plan_units, quarter, sliver
from zero3d.comm.flat import Pool
from zero3d.computed import in_rehearsal
from zero3d.config import Config
from zero3d.contracts import Axis, Homes, Store
from zero3d.params import ParamInfo
from zero3d.precision import Dtypes
from zero3d.zero.beside import BESIDE
from zero3d.zero.gathered import GatheredWeights
from zero3d.zero.holding import Holding, Weights
from zero3d.zero.lanes import Lanes
from zero3d.zero.published import PublishedWeights
from zero3d.zero.reducer import Lane, Reducer
from zero3d.zero.replica import ZeroReplica
from zero3d.zero.shard import Shard
from zero3d.zero.units import Unit, keep_gathered
from zero3d.zero.whole import WholeWeights


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `[zero]` says; `reduce_every_turn`: once a micro-batch."""

    level: int
    bucket_bytes: float
    prefetch: int
    overlap: bool
    reduce_every_turn: bool
    keep_gathered: tuple[str, ...]
    keeps_gathered: bool


@dataclass(frozen=True)
class Level:
    """One row of the table above."""

    weights: Callable[[Axis, Pool, Options, Store | None], Weights]
    shards_optimizer: bool
    joined_bytes: Callable[[float], float]
    gathers: bool


def _gathered(axis: Axis, pool: Pool, options: Options, store: Store | None) -> Weights:
    return GatheredWeights(
        axis,
        pool,
        prefetch=options.prefetch,
        overlap=options.overlap,
        keeps=options.keeps_gathered,
        store=store,
    )


def _published(axis: Axis, pool: Pool, options: Options, store: Store | None) -> Weights:
    return PublishedWeights(axis, overlap=options.overlap)


def _whole(axis: Axis, pool: Pool, options: Options, store: Store | None) -> Weights:
    return WholeWeights()


LEVELS = {
    0: Level(_whole, shards_optimizer=False, joined_bytes=quarter, gathers=False),
    1: Level(_published, shards_optimizer=True, joined_bytes=quarter, gathers=False),
    2: Level(_published, shards_optimizer=True, joined_bytes=sliver, gathers=False),
    3: Level(_gathered, shards_optimizer=True, joined_bytes=sliver, gathers=True),
}


def gathers(config: Config) -> bool:
    """Whether weights are whole only while they are used."""
    return LEVELS[config.zero.level].gathers


def options_for(config: Config) -> Options:
    """What a resolved configuration asks for."""
    zero = config.zero
    return Options(
        # On one rank level 1 is level 0, and weights are waited for that are updated elsewhere.
        level=zero.level if config.offload.optimizer == "device" else max(zero.level, 1),
        bucket_bytes=zero.bucket_mb * 1e6,
        # Stages of one rank take turns: what the forward before began with tells nothing.
        prefetch=zero.prefetch if config.parallel.stages_per_rank == 1 else 0,
        overlap=zero.overlap,
        reduce_every_turn=zero.reduce == "micro-batch",
        keep_gathered=() if zero.keep_gathered == "step" else zero.keep_gathered,
        keeps_gathered=zero.keep_gathered == "step",
    )


def replica_for(
    options: Options,
    axis: Axis,
    blueprint: Blueprint,
    units: Sequence[Unit],
    dtypes: Dtypes,
    device: torch.device,
    homes: Homes = BESIDE,
    root: nn.Module | None = None,
) -> ZeroReplica:
    """Builds the replica bucket by bucket: at no time is more than one bucket whole that need not stay whole.

    homes: where the optimizer's part of each bucket lives
    root: the module whose forward runs `units`; the model where left out."""
    level = LEVELS[options.level]
    pool, passing = Pool(device), Pool(device)
    weights = level.weights(axis, pool, options, homes.store)
    infos = {info.name: info for info in params.collect(blueprint.model)}
    units = keep_gathered(units, infos.values(), options.keep_gathered)
    placed: set[str] = set()
    frozen: list[Holding] = []
    trained: list[tuple[Holding, Shard, Lane]] = []
    buckets = _buckets(units, infos, dtypes, axis.size, options.bucket_bytes, level.joined_bytes)
    homes.plan(buckets, axis, whole=not options.reduce_every_turn)
    lanes = Lanes(
        axis=axis,
        pool=pool,
        dtypes=dtypes,
        shards_optimizer=level.shards_optimizer,
        every_turn=options.reduce_every_turn,
        stored=homes.store is not None,
    )
    for bucket in buckets:
        held = [infos[slot.name] for slot in bucket.slots]
        initial = _initial(bucket, held, blueprint, axis, passing)
        compute = dtypes.compute(held[0])
        parameters = [(info.name, _parameter(blueprint.model, info, device, compute)) for info in held]
        holding = weights.adopt(bucket, parameters, initial, compute)
        if bucket.trainable:
            home = homes.of(bucket)
            shard, lane = lanes.leaves(holding, initial, home) if home else lanes.stays(holding, initial)
            trained.append((holding, shard, lane))
        else:
            frozen.append(holding)
        passing.give(initial)
        placed.update(slot.name for slot in bucket.slots)
    for info in infos.values():
        if not info.numel and info.name not in placed:  # There is nothing to hold.
            _parameter(blueprint.model, info, device, dtypes.compute(info))
    _place_buffers(blueprint, axis, device)
    weights.watch(blueprint.model if root is None else root, units)
    return ZeroReplica(
        axis=axis,
        pool=pool,
        weights=weights,
        frozen=frozen,
        trained=trained,
        reducer=Reducer(
            axis,
            [lane for _, _, lane in reversed(trained)],
            every_turn=options.reduce_every_turn,
            overlap=options.overlap,
        ),
    )


def _buckets(
    units: Sequence[Unit],
    infos: dict[str, ParamInfo],
    dtypes: Dtypes,
    ranks: int,
    limit: float,
    joined_bytes: Callable[[float], float],
) -> list[Bucket]:
    def want(name: str) -> Want:
        compute = dtypes.compute(infos[name])
        key = (str(compute).removeprefix("torch."), infos[name].trainable)
        return Want(name=name, numel=infos[name].numel, itemsize=compute.itemsize, key=key)

    asking = [Asking(unit.name or "(root)", [want(name) for name in unit.names], unit.alone) for unit in units]
    return plan_units(asking, ranks, limit, joined_bytes)


def _initial(bucket: Bucket, infos: Sequence[ParamInfo], blueprint: Blueprint, axis: Axis, passing: Pool) -> Tensor:
    """The whole bucket's first values, fp32 unless they are integers; the same bits on every rank.

    In a buffer of `passing`, as memory that comes and goes with every bucket would stay with the process.
    """
    dtype = torch.float32 if infos[0].dtype.is_floating_point else infos[0].dtype
    flat = passing.take(bucket.numel, dtype).zero_()
    for slot, info in zip(bucket.slots, infos):
        blueprint.fill(info.name, flat[slot.offset : slot.offset + slot.numel].view(info.shape))
    if any(info.name in blueprint.given for info in infos):
        axis.broadcast(flat.view(torch.uint8), 0, f"first weights of {bucket.label}").wait()
    return flat


def _parameter(model: nn.Module, info: ParamInfo, device: torch.device, compute: torch.dtype) -> nn.Parameter:
    """The user's own parameter object; a new one where the model was built without memory."""
    parameter = model.get_parameter(info.name)
    if parameter.is_meta:
        value = torch.empty(info.shape, dtype=compute, device=device)
        parameter = nn.Parameter(value, requires_grad=info.trainable)
        params.replace(model, info, parameter)
    return parameter


def _place_buffers(blueprint: Blueprint, axis: Axis, device: torch.device) -> None:
    """Buffers are small and whole on every rank, with rank 0's values."""
    for module in blueprint.model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if in_rehearsal() and buffer.is_floating_point():
                moved = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            else:
                moved = buffer.to(device).contiguous()
            setattr(module, name, moved)
            if moved.numel():
                axis.broadcast(moved.view(-1).view(torch.uint8), 0, f"buffer {name}").wait()
