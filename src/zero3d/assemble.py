"""The order of the parallelisms, once: model -> tensor -> weights -> recompute -> zero -> optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zero3d.access import refuse_sharded
from zero3d.comm.mesh import Mesh
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.config import Config
from zero3d.contracts import Axis, Loss, ModelSource, OptimizerChoice
from zero3d.errors import UsageError
from zero3d.initial import draw
from zero3d.models.plans import tensor_plan
from zero3d.notices import notices
from zero3d.optim.assignment import assign
from zero3d.optim.sharded import ShardedOptimizer
from zero3d.params import ParamInfo
from zero3d.pipeline.action import Action
from zero3d.pipeline.calling import Call, caller
from zero3d.pipeline.schedules.accumulate import accumulate
from zero3d.pipeline.stage import ModelStage
from zero3d.precision import Scaler, dtypes_for
from zero3d.randomness import Randomness
from zero3d.recompute import Recomputed, recompute
from zero3d.tensor.split import TensorParallel, split
from zero3d.zero.levels import gathers, options_for, replica_for
from zero3d.zero.replica import ZeroReplica
from zero3d.zero.units import find_blocks, split_units


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a step needs, put together."""

    model: nn.Module
    infos: Sequence[ParamInfo]
    axes: Sequence[RecordedAxis]
    axis: RecordedAxis
    model_axis: Axis
    device: torch.device
    stage: ModelStage
    tensor: TensorParallel
    randomness: Randomness
    recomputed: Sequence[Recomputed]
    replica: ZeroReplica
    counts_norms: bool
    uncounted: frozenset[str]
    optimizer: ShardedOptimizer
    scaler: Scaler
    clip_norm: float
    notice: str

    def close(self) -> None:
        """Modules and gradients are the user's again; weights can still be gathered, read and written."""
        self.replica.close()
        self.tensor.close()
        self.randomness.close()
        for block in self.recomputed:
            block.close()

    def actions(self, micro_batches: int) -> Sequence[Action]:
        return accumulate(1, 1, micro_batches)[0]


def assemble(
    source: ModelSource, loss: Loss, optimizer: OptimizerChoice, config: Config, mesh: Mesh, call: Call | None
) -> Parts:
    """Builds this rank's parts of `source` as the resolved `config` says. Collective over all ranks of `mesh`."""
    axis, device = mesh.axes["dp"], mesh.device
    blueprint = draw(source, config.run.seed)
    model = blueprint.model
    refuse_sharded(model)
    randomness = Randomness(config.run.seed, axis.index, device, mesh.axes["tp"].index)
    parallel = config.parallel
    plan = tensor_plan(model)
    blueprint, tensor = split(
        blueprint, mesh.axes["tp"], randomness, plan, parallel.plan, sequence=parallel.sequence_parallel
    )
    infos = tensor.infos(model)
    dtypes = dtypes_for(config)
    dtypes.check(infos)
    assignment = assign(optimizer, config.optimizer, config.zero.whole_parameters, infos)
    tensor.refuse_whole(assignment.whole)
    _, blocks = find_blocks(model, config.model.blocks)
    if config.recompute.mode == "block" and not blocks:
        raise UsageError(
            'recompute.mode = "block", and no list of repeated blocks was found in the model',
            hint='Name it with model.blocks = "path.of.the.list", or set recompute.mode = "none".',
        )

    randomness.watch(model, blocks, apart=tensor.sequence)
    recomputed = recompute(model, blocks if config.recompute.mode == "block" else ())
    replica = replica_for(options_for(config), mesh.sharding, blueprint, split_units(model, blocks), dtypes, device)
    tensor.watch(model, blocks)
    scaler = Scaler(enabled=dtypes.compute_rule is torch.float16)
    scale = partial(scaler.for_loss, axis)
    return Parts(
        model=model,
        infos=infos,
        axes=tuple(mesh.axes.values()),
        axis=axis,
        model_axis=mesh.model,
        device=device,
        stage=ModelStage(model, call or caller(model, dtypes.compute_rule), loss, randomness, scale),
        tensor=tensor,
        randomness=randomness,
        recomputed=recomputed,
        replica=replica,
        counts_norms=mesh.counts_norms,
        uncounted=frozenset(info.name for info in infos if not tensor.counts(info.name)),
        optimizer=ShardedOptimizer(assignment, replica.shards, mesh.sharding),
        scaler=scaler,
        clip_norm=config.optimizer.clip_norm,
        notice=notices(blueprint.notice, model, has_blocks=bool(blocks), gathers=gathers(config)),
    )
