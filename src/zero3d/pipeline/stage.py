"""The whole model as one stage: forward, loss, backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.contracts import Batch, Loss
from zero3d.errors import UsageError
from zero3d.pipeline.calling import Call
from zero3d.randomness import Randomness


@dataclass(frozen=True)
class Outcome:
    """The loss of one micro-batch, summed over `count` targets; 0-dim tensors, without graph."""

    loss: Tensor
    count: Tensor


class ModelStage:
    """The `Stage` of a model that is not cut. `scale` gives the loss scale for a micro-batch of so many targets."""

    index = 0

    def __init__(
        self, model: nn.Module, call: Call, loss: Loss, randomness: Randomness, scale: Callable[[Tensor], float]
    ) -> None:
        self._model = model
        self._call = call
        self._loss = loss
        self._randomness = randomness
        self._scale = scale
        self._live: dict[int, tuple[Tensor, Tensor]] = {}
        self.outcomes: list[Outcome] = []

    def start(self) -> None:
        """A new step: forgets what the last one left."""
        self._live.clear()
        self.outcomes.clear()

    def forward(self, micro_batch: int, x: Batch) -> None:
        self._randomness.enter(micro_batch)
        loss, count = self.losses(x)
        self._live[micro_batch] = loss, count
        self.outcomes.append(Outcome(loss.detach(), count))

    def backward(self, micro_batch: int, gradient: Any) -> None:
        loss, count = self._live.pop(micro_batch)
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, self._scale(count)))

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum, count) of one micro-batch."""
        output = self._call(self._model, batch)
        result = self._loss(output, batch)
        loss, count = result if isinstance(result, tuple) else (result, 1)
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"the loss function returned {what}",
                hint="It must return (sum over the counted targets, their number), or one mean: a 0-dim tensor.",
            )
        return loss, torch.as_tensor(count, dtype=torch.int64, device=loss.device)
