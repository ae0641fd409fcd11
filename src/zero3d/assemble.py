"""The order of the parallelisms, once: model -> weights -> recompute -> zero -> optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zero3d import params
from zero3d.access import refuse_sharded
from zero3d.comm.mesh import Mesh
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.config import Config
from zero3d.contracts import Loss, ModelSource, OptimizerChoice
from zero3d.errors import UsageError
from zero3d.initial import draw
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
from zero3d.zero.levels import gathers, options_for, replica_for
from zero3d.zero.replica import ZeroReplica
from zero3d.zero.units import find_blocks, split_units


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a step needs, put together."""

    model: nn.Module
    infos: Sequence[ParamInfo]
    axis: RecordedAxis
    device: torch.device
    stage: ModelStage
    randomness: Randomness
    recomputed: Sequence[Recomputed]
    replica: ZeroReplica
    counts_norms: bool
    optimizer: ShardedOptimizer
    scaler: Scaler
    clip_norm: float
    notice: str

    def close(self) -> None:
        """Modules and gradients are the user's again; weights can still be gathered, read and written."""
        self.replica.close()
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
    infos = params.collect(model)
    dtypes = dtypes_for(config)
    dtypes.check(infos)
    assignment = assign(optimizer, config.optimizer, config.zero.whole_parameters, infos)
    _, blocks = find_blocks(model, config.model.blocks)
    if config.recompute.mode == "block" and not blocks:
        raise UsageError(
            'recompute.mode = "block", and no list of repeated blocks was found in the model',
            hint='Name it with model.blocks = "path.of.the.list", or set recompute.mode = "none".',
        )

    randomness = Randomness(config.run.seed, axis.index, device)
    randomness.watch(model, blocks)
    recomputed = recompute(model, blocks if config.recompute.mode == "block" else ())
    replica = replica_for(options_for(config), mesh.sharding, blueprint, split_units(model, blocks), dtypes, device)
    scaler = Scaler(enabled=dtypes.compute_rule is torch.float16)
    scale = partial(scaler.for_loss, axis)
    return Parts(
        model=model,
        infos=infos,
        axis=axis,
        device=device,
        stage=ModelStage(model, call or caller(model, dtypes.compute_rule), loss, randomness, scale),
        randomness=randomness,
        recomputed=recomputed,
        replica=replica,
        counts_norms=mesh.counts_norms,
        optimizer=ShardedOptimizer(assignment, replica.shards, mesh.sharding),
        scaler=scaler,
        clip_norm=config.optimizer.clip_norm,
        notice=notices(blueprint.notice, model, has_blocks=bool(blocks), gathers=gathers(config)),
    )
