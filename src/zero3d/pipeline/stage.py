"""A run of blocks that one rank computes: forward, loss, backward. A model that is not cut is one stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.contracts import Batch, Loss
from zero3d.errors import UsageError
from zero3d.linears import Half, Linears
from zero3d.pipeline.absent import present
from zero3d.pipeline.calling import Call
from zero3d.pipeline.exchange import Arrived, Boundary, Signature
from zero3d.pipeline.gates import Gates, Run
from zero3d.pipeline.specs import Spec
from zero3d.pipeline.uneven import Buffers, Padding
from zero3d.randomness import Randomness
from zero3d.trees import tensors_in


@dataclass(frozen=True)
class Outcome:
    """The loss of one micro-batch, summed over `count` targets; 0-dim tensors, without graph. Zeros for padding."""

    loss: Tensor
    count: Tensor


@dataclass(frozen=True, kw_only=True)
class Live:
    """A micro-batch between its forward and its backward.

    outgoing: what later stages have, received: what came from earlier ones; before: buffers that its backward puts back
    """

    signature: Signature
    outcome: Outcome | None = None
    loss: Tensor | None = None
    outgoing: Mapping[str, Tensor] = field(default_factory=dict)
    received: Mapping[str, Tensor] = field(default_factory=dict)
    before: Buffers | None = None


class StageModel(nn.Module):
    """What runs as a whole on a rank with stages: the model, up to the end of a stage. Has no parameters of its own."""

    def __init__(self, model: nn.Module, gates: Gates, call: Call) -> None:
        super().__init__()
        self._compute: Callable[[Batch], Any] = partial(call, model)
        self._gates = gates

    def forward(self, batch: Batch, run: Run) -> Any:
        """The model's output, where the run reaches it, and what is sent on."""
        output: Any = None
        with self._gates.run(run):
            output = present(self._compute(batch))
        return (output, run.given)


class ModelStage:
    """The `Stage` of a model, or of a part of it between two boundaries.

    compute: (micro-batch, run) -> the model's output, on the last stage; scale: the loss scale for a micro-batch of so
    many targets; before, after: None at the ends of the model
    """

    def __init__(
        self,
        *,
        index: int,
        blocks: range,
        model: nn.Module,
        compute: Callable[[Batch, Run], Any],
        loss: Loss,
        randomness: Randomness,
        scale: Callable[[Tensor], float],
        device: torch.device,
        linears: Linears,
        before: Boundary | None = None,
        after: Boundary | None = None,
    ) -> None:
        self.index = index
        self.outcomes: list[Outcome] = []
        self.before, self.after = before, after
        self._blocks = blocks
        self._model = model
        self._compute = compute
        self._loss = loss
        self._randomness = randomness
        self._scale = scale
        self._device = device
        self._linears = linears
        self._live: dict[int, Live] = {}
        self._halves: dict[int, list[Half]] = {}

    def start(self) -> None:
        """A new step: forgets what the last one left."""
        self._live.clear()
        self._halves.clear()
        self.outcomes.clear()

    def expect(self, micro_batch: int, x: Batch | Padding) -> None:
        """The forward of `micro_batch` is this rank's next but one action."""
        if self.before is not None:
            self.before.expect(micro_batch, _signature(x))

    def expect_gradients(self, micro_batch: int) -> None:
        """Its backward is."""
        if self.after is not None and micro_batch in self._live:
            self.after.expect_gradients(micro_batch, self._live[micro_batch].signature)

    def forward(self, micro_batch: int, x: Batch | Padding) -> None:
        self._randomness.enter(micro_batch)
        self._linears.start_forward()
        self._live[micro_batch] = self._run(micro_batch, x)

    def backward(self, micro_batch: int) -> None:
        live = self._live.pop(micro_batch)
        if live.loss is not None and live.outcome is not None and live.loss.requires_grad:
            self._linears.backward([live.loss], [torch.full_like(live.loss, self._scale(live.outcome.count))])
        if self.after is not None:
            gradients = self.after.receive_gradients(micro_batch, live.signature)
            if gradients:
                outgoing = [live.outgoing[name] for name in gradients]
                self._linears.backward(outgoing, list(gradients.values()))
        if self.before is not None:
            self.before.send_gradients(micro_batch, live.signature, live.received)
        if live.before is not None:
            live.before.put_back()

    def evaluate(self, micro_batch: int, x: Batch | Padding, outputs: list[Any] | None = None) -> None:
        """A forward that no backward follows; the last stage adds what the model gives to `outputs`."""
        live = self._run(micro_batch, x, outputs)
        if live.before is not None:
            live.before.put_back()

    def try_out(self, batch: Batch, signature: Signature) -> Run:
        """A forward whose result is of no account: what it needs, and what it gives."""
        arrived = self._receive(0, signature)
        run = self._run_of(arrived)
        output = self._compute(batch, run)
        if self.after is not None:
            self._send(self.after, 0, signature, arrived, run)
        else:
            self._losses(output, batch)
        return run

    def input_backward(self, micro_batch: int) -> None:
        halves = self._halves[micro_batch] = []
        with self._linears.deferring(halves):
            self.backward(micro_batch)

    def weight_backward(self, micro_batch: int) -> None:
        self._linears.finish(self._halves.pop(micro_batch))

    def _run(self, micro_batch: int, x: Batch | Padding, outputs: list[Any] | None = None) -> Live:
        # Autograd may keep buffers that a forward has written to: they are put back once backward is over.
        before = Buffers(self._model) if isinstance(x, Padding) else None
        batch, signature = (x.batch if isinstance(x, Padding) else x), _signature(x)
        arrived = self._receive(micro_batch, signature)
        run = self._run_of(arrived)
        output = self._compute(batch, run)
        if self.after is not None:
            given = self._send(self.after, micro_batch, signature, arrived, run)
            return Live(signature=signature, outgoing=given, received=arrived.tensors, before=before)
        if outputs is not None and not isinstance(x, Padding):
            outputs.append(output)
        loss, count = self._losses(output, batch)
        outcome = Outcome(loss.detach(), count)
        if before is not None:
            outcome = Outcome(torch.zeros_like(outcome.loss), torch.zeros_like(count))
        self.outcomes.append(outcome)
        return Live(signature=signature, outcome=outcome, loss=loss, received=arrived.tensors, before=before)

    def _receive(self, micro_batch: int, signature: Signature) -> Arrived:
        return Arrived() if self.before is None else self.before.receive(micro_batch, signature)

    def _send(
        self, after: Boundary, micro_batch: int, signature: Signature, arrived: Arrived, run: Run
    ) -> dict[str, Tensor]:
        """-> what there is to be carried, from this stage and from earlier ones."""
        run.refuse_changed(after.names or ())
        given: dict[str, Tensor] = {**arrived.tensors, **run.entered, **run.given}
        specs: dict[str, Spec] = {**arrived.specs, **run.made}
        after.send(micro_batch, signature, given, specs)
        return given

    def _run_of(self, arrived: Arrived) -> Run:
        return Run(
            stage=self.index,
            blocks=self._blocks,
            received=arrived.tensors,
            specs=arrived.specs,
            device=self._device,
            is_sent=self.after is not None,
            skipped=self._randomness.skip,
        )

    def _losses(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum, count) of one micro-batch."""
        result = self._loss(output, batch)
        loss, count = result if isinstance(result, tuple) else (result, 1)
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            what += " as the first of the two" if isinstance(result, tuple) else ""
            raise UsageError(
                f"the loss function returned {what}",
                hint="It must return (sum over the counted targets, their number), or one mean: a 0-dim tensor.",
            )
        return loss, whole_count(count, "the loss function counted").to(loss.device)


def whole_count(count: Tensor | float, who: str) -> Tensor:
    """A number of targets as a 0-dim integer tensor. Raises `UsageError` for one that is not whole; `who` gave it."""
    counted = torch.as_tensor(count)
    if counted.is_floating_point() and not float(counted).is_integer():
        raise UsageError(
            f"{who} {float(counted)} targets",
            hint="The count must be a whole number. Weights of targets belong into the sum.",
        )
    return counted.to(torch.int64)


def _signature(x: Batch | Padding) -> Signature:
    """What decides the shapes of all that is computed."""
    batch = x.batch if isinstance(x, Padding) else x
    return (torch.is_grad_enabled(), *((tuple(one.shape), one.dtype) for one in tensors_in(batch)))
