"""zero3d: trains PyTorch models with ZeRO levels 0 to 3, and the same numbers at every level.

Glossary. These words and no others are used in code, commands, errors and reports.

axis         one of dp (data), tp (tensor), pp (pipeline); has a size, and my index on it. A tensor has dims.
layout       the three sizes, dp x tp x pp = world; rank = ((pp_index * dp) + dp_index) * tp + tp_index
stage        a pipeline stage, nothing else
level        ZeRO's number: 0 nothing is sharded over dp, 1 optimizer state, 2 + gradients, 3 + parameters
block        one of the model's repeated layers
unit         a block, or one of the modules outside the blocks: what is gathered, released and reduced as one
bucket       which parameters sit where in one padded flat buffer: one dtype, all trainable or all frozen
shard        my 1/dp of a bucket: master weights, gradient, optimizer state
master       the fp32 weights that the optimizer updates
piece        the part of one parameter that lies in a shard
home         where a shard's optimizer part lives: device, host, disk
step         one optimizer update over a global batch of micro-batches
turn         one backward of a stage within a step
action       one entry of a schedule: forward, backward, or a part of a backward, of (stage, micro-batch)
to gather    to bring a bucket's shards together; to release: to keep only mine
to reduce    to sum over ranks, each keeping its part; to publish: to send new weights to all ranks
held, sent   bytes that a rank keeps; bytes that leave it
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero3d.config import Config
from zero3d.errors import (
    ConfigError,
    DataError,
    DivergedError,
    NonFiniteError,
    OutOfSpaceError,
    RankFailedError,
    ReleasedParameterError,
    UsageError,
    Zero3dError,
)

if TYPE_CHECKING:
    from zero3d.comparison import verify
    from zero3d.dryrun.run import rehearse_model as rehearse
    from zero3d.engine import Engine
    from zero3d.models.pretrained import pretrained
    from zero3d.own_loop import Sharded, shard
    from zero3d.tensor.loss import cross_entropy

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "DataError",
    "DivergedError",
    "Engine",
    "EvaluateReport",
    "NonFiniteError",
    "OutOfSpaceError",
    "RankFailedError",
    "ReleasedParameterError",
    "Sharded",
    "StepReport",
    "UsageError",
    "Zero3dError",
    "cross_entropy",
    "pretrained",
    "rehearse",
    "shard",
    "verify",
]

_NEED_TORCH = {
    "Engine": "zero3d.engine",
    "EvaluateReport": "zero3d.reports",
    "StepReport": "zero3d.reports",
    "Sharded": "zero3d.own_loop",
    "cross_entropy": "zero3d.tensor.loss",
    "pretrained": "zero3d.models.pretrained",
    "rehearse": "zero3d.dryrun.run",
    "shard": "zero3d.own_loop",
    "verify": "zero3d.comparison",
}


_INSIDE = {"rehearse": "rehearse_model"}
"""What it is called there."""


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for: a refused configuration costs no seconds."""
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), _INSIDE.get(name, name))
    raise AttributeError(f"module 'zero3d' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
