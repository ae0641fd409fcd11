"""What a step, and an evaluation, came to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero3d.offload.queues import Seconds


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step, the same on every rank.

    loss: mean over the global batch's counted targets (NaN without any); tokens: their number; grad_norm: before
    clipping; clip_coefficient: what gradients were multiplied by; lr: of the first parameter group; skipped: nothing
    was updated (fp16 overflow, or no target counted); seconds: on this rank, from call to return; loss_scale: fp16's,
    else 1; offload: where they went, or None without offload; sent: axis -> bytes that this rank sent in it; mfu:
    the part of the devices' peak FLOP/s that the model's own are, as `zero3d train` finds it where the peak is known.
    """

    step: int
    loss: float
    tokens: int
    grad_norm: float
    clip_coefficient: float
    lr: float
    skipped: bool
    seconds: float
    loss_scale: float
    offload: Seconds | None = None
    sent: Mapping[str, int] = field(default_factory=dict)
    mfu: float | None = None

    @property
    def grad_norm_after(self) -> float:
        """The norm after clipping."""
        return self.grad_norm * self.clip_coefficient

    @property
    def compute_seconds(self) -> float:
        """Those in which the rank did not stand still for what it offloads."""
        return self.seconds - (self.offload.waited if self.offload else 0.0)

    @property
    def split(self) -> dict[str, float] | None:
        """The seconds of a step with offload, by what they went into: "compute" (`compute_seconds`), "down", "update"
        and "up" (that the queues worked), "hidden" (what of these three was beside other work). Else None."""
        if self.offload is None:
            return None
        queues = {name: getattr(self.offload, name) for name in ("down", "update", "up", "hidden")}
        return {"compute": self.compute_seconds, **queues}


@dataclass(frozen=True, kw_only=True)
class EvaluateReport:
    """The mean loss over the counted targets of all ranks' batches (NaN without any), and their number.

    outputs: what the model gave for this rank's batch, if it was asked for
    """

    loss: float
    tokens: int
    outputs: Any = None
