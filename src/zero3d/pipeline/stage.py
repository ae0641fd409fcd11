"""The whole model as one stage: forward, loss, backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.contracts import Batch, Loss
from zero3d.errors import UsageError
from zero3d.pipeline.calling import Call
from zero3d.pipeline.uneven import Buffers, Padding
from zero3d.randomness import Randomness


@dataclass(frozen=True)
class Outcome:
    """The loss of one micro-batch, summed over `count` targets; 0-dim tensors, without graph. Zeros for padding."""

    loss: Tensor
    count: Tensor


@dataclass(frozen=True)
class Live:
    """A micro-batch between its forward and its backward; `before`: buffers that its backward puts back."""

    loss: Tensor
    count: Tensor
    before: Buffers | None


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
        self._live: dict[int, Live] = {}
        self.outcomes: list[Outcome] = []

    def start(self) -> None:
        """A new step: forgets what the last one left."""
        self._live.clear()
        self.outcomes.clear()

    def forward(self, micro_batch: int, x: Batch | Padding) -> None:
        self._randomness.enter(micro_batch)
        self._live[micro_batch] = self._run(x)

    def backward(self, micro_batch: int, gradient: Any) -> None:
        live = self._live.pop(micro_batch)
        if live.loss.requires_grad:
            live.loss.backward(torch.full_like(live.loss, self._scale(live.count)))
        if live.before is not None:
            live.before.put_back()

    def evaluate(self, x: Batch | Padding) -> None:
        """A forward that no backward follows."""
        live = self._run(x)
        if live.before is not None:
            live.before.put_back()

    def _run(self, x: Batch | Padding) -> Live:
        # Autograd may keep buffers that a forward has written to: they are put back once backward is over.
        before = Buffers(self._model) if isinstance(x, Padding) else None
        loss, count = self.losses(x.batch if isinstance(x, Padding) else x)
        counted = Outcome(loss.detach(), count)
        if before is not None:
            counted = Outcome(torch.zeros_like(counted.loss), torch.zeros_like(count))
        self.outcomes.append(counted)
        return Live(loss, counted.count, before)

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
        return loss, whole_count(torch.as_tensor(count, device=loss.device), "the loss function counted")


def whole_count(count: Tensor | int, told: str) -> Tensor:
    """A number of targets, int64. Raises `UsageError` for one that is not whole; told: how we know, "it counted"."""
    counted = torch.as_tensor(count)
    if counted.is_floating_point() and not float(counted).is_integer():
        raise UsageError(
            f"{told} {float(counted)} targets",
            hint="The count must be a whole number. Weights of targets belong into the sum.",
        )
    return counted.to(torch.int64)
