"""The order of the parallelisms, once: model -> tensor -> pipeline -> weights -> recompute -> zero -> optimizer."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zero3d.access import refuse_sharded
from zero3d.comm.mesh import Mesh
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.config import Config
from zero3d.contracts import Axis, Loss, ModelSource, OptimizerChoice
from zero3d.initial import draw
from zero3d.models.plans import tensor_plan
from zero3d.notices import notices
from zero3d.offload.homes import AnyHomes, AnyOptimizer, homes_for
from zero3d.optim.assignment import assign
from zero3d.params import ParamInfo
from zero3d.pipeline.action import Action
from zero3d.pipeline.assembly import Pipeline
from zero3d.pipeline.calling import Call, caller
from zero3d.pipeline.stage import ModelStage
from zero3d.pipeline.tied import Tied
from zero3d.precision import Scaler, dtypes_for
from zero3d.randomness import Randomness
from zero3d.recompute import Recomputed, recompute
from zero3d.tensor.partial import Partial
from zero3d.tensor.split import TensorParallel, split
from zero3d.zero.levels import gathers, options_for, replica_for
from zero3d.zero.replica import ZeroReplica
from zero3d.zero.units import find_blocks, of_rank, split_units


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a step needs, put together."""

    model: nn.Module
    infos: Sequence[ParamInfo]
    axes: Sequence[RecordedAxis]
    axis: RecordedAxis
    model_axis: Axis
    everyone: Axis
    device: torch.device
    pipeline: Pipeline
    tensor: TensorParallel
    randomness: Randomness
    recomputed: Sequence[Recomputed]
    replica: ZeroReplica
    counts_norms: bool
    uncounted: frozenset[str]
    speaks: bool
    shared: frozenset[str]
    sums: Sequence[Tied | Partial]
    homes: AnyHomes
    optimizer: AnyOptimizer
    scaler: Scaler
    clip_norm: float
    notice: str

    def close(self) -> None:
        """Modules and gradients are the user's again; weights can still be gathered, read and written."""
        with ExitStack() as closing:  # Whatever goes wrong with one of them.
            for part in (*self.recomputed, self.randomness, self.tensor, self.pipeline, self.homes, self.replica):
                closing.callback(part.close)
            self.replica.publish(self.optimizer.flush())

    @property
    def stages(self) -> Mapping[int, ModelStage]:
        return self.pipeline.local

    def actions(self, micro_batches: int) -> Sequence[Action]:
        return self.pipeline.actions(micro_batches)


def assemble(
    source: ModelSource, loss: Loss, optimizer: OptimizerChoice, config: Config, mesh: Mesh, call: Call | None
) -> Parts:
    """Builds this rank's parts of `source` as the resolved `config` says. Collective over all ranks of `mesh`."""
    axis, device = mesh.axes["dp"], mesh.device
    refuse_sharded(source)
    blueprint = draw(source, config.run.seed)
    model = blueprint.model
    refuse_sharded(model)
    randomness = Randomness(config.run.seed, axis.index, device, mesh.axes["tp"].index)
    blueprint, tensor = split(blueprint, mesh.axes["tp"], randomness, tensor_plan(model), config.parallel)
    infos = tensor.infos(model)
    dtypes = dtypes_for(config)
    dtypes.check(infos)
    assignment = assign(optimizer, config.optimizer, config.zero.whole_parameters, infos)
    tensor.refuse_whole(assignment.whole)
    _, blocks = find_blocks(model, config.model.blocks)
    call = call or caller(model, dtypes.compute_rule)
    pipeline = Pipeline(model, blocks, config.parallel, mesh.axes["pp"], device, randomness, call)
    shared = pipeline.placed.shared()
    randomness.watch(model, blocks, apart=tensor.sequence)
    recomputed = recompute(model, blocks, config.recompute.mode)
    units = of_rank(split_units(model, blocks), pipeline.placed.has, shared)
    homes = homes_for(config, mesh, dtypes, assignment)
    replica = replica_for(options_for(config), mesh.sharding, blueprint, units, dtypes, device, homes, pipeline.root)
    tensor.watch(model, blocks, pipeline.linears)
    scaler = Scaler(enabled=dtypes.compute_rule is torch.float16)
    pipeline.open(loss, partial(scaler.for_loss, axis), blocks, replica.place)
    return Parts(
        model=model,
        infos=infos,
        axes=tuple(mesh.axes.values()),
        axis=axis,
        model_axis=mesh.model,
        everyone=mesh.everyone,
        device=device,
        pipeline=pipeline,
        tensor=tensor,
        randomness=randomness,
        recomputed=recomputed,
        replica=replica,
        counts_norms=mesh.counts_norms,
        uncounted=frozenset(i.name for i in infos if not (tensor.counts(i.name) and pipeline.placed.counts(i.name))),
        speaks=pipeline.speaks and mesh.axes["tp"].index == 0,
        shared=frozenset(shared),  # What no rank of one stage used, another's may have.
        sums=(tensor.partial(replica.shards), Tied(mesh.axes["pp"], shared, replica.shards)),
        homes=homes,
        optimizer=homes.optimizer(assignment, replica, mesh.sharding),
        scaler=scaler,
        clip_norm=config.optimizer.clip_norm,
        notice=notices(blueprint.notice, model, mesh.placement, has_blocks=bool(blocks), gathers=gathers(config)),
    )
