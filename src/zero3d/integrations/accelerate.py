"""`zero3d.shard` in a loop of Accelerate's: the model is sharded, and not prepared; all the rest stays prepared.

sharded = shard(accelerator, model, optimizer, level=3)
optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import nn

from zero3d import own_loop
from zero3d.config import Config
from zero3d.errors import UsageError
from zero3d.integrations.world import refuse_world
from zero3d.own_loop import Sharded

OTHERS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""What shards, or cuts, the model by itself."""


def shard(
    accelerator: Accelerator,
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    level: int = 3,
    config: Config | Mapping[str, Any] | None = None,
) -> Sharded:
    """As `zero3d.shard`, over the processes of `accelerator`; before `accelerator.prepare`, which is then called
    without the model.

    Raises `UsageError` where `accelerator` would shard or cast the model too, and later in `accelerator.save_state`
    and `load_state`, which know one rank's slices alone.
    """
    refuse_world(accelerator.num_processes, accelerator.device, "cpu=True")
    if accelerator.distributed_type in OTHERS:
        raise UsageError(
            f"Accelerate was told to use {accelerator.distributed_type.value}, and zero3d shards the model",
            hint="Make the Accelerator without a plugin, and start with torchrun or `accelerate launch --multi_gpu`.",
        )
    if accelerator.mixed_precision != "no":
        raise UsageError(
            f'mixed_precision = "{accelerator.mixed_precision}" would do nothing, as the model is not prepared',
            hint='Leave it out, and pass config={"precision": {"compute": "bf16"}}.',
        )
    if accelerator.unwrap_model(model) is not model or any(isinstance(o, AcceleratedOptimizer) for o in optimizers):
        raise UsageError(
            "the model, or an optimizer, has been through accelerator.prepare",
            hint="Shard first; then prepare the optimizer, the loader and the scheduler, and not the model.",
        )
    sharded = own_loop.shard(model, *optimizers, level=level, config=config)
    accelerator.register_save_state_pre_hook(_refuse_state)
    accelerator.register_load_state_pre_hook(_refuse_state)
    return sharded


def _refuse_state(*_: Any) -> None:
    raise UsageError(
        "accelerator.save_state and load_state would keep one rank's slices for all of them",
        hint="sharded.full_state_dict() has the weights. For checkpoints of the whole training use zero3d.Engine or "
        "Zero3dTrainer.",
    )
