"""The reference: a plain training loop in one process. Imports nothing of zero3d.

Losses are sums over the global batch divided by its number of counted targets; micro-batches are added in order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Trace:
    """What a run produced, step by step; `weights` and `gradients` are of the last step."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def train(
    model: nn.Module,
    loss: Callable[[Any, Any], tuple[Tensor, int]],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: Sequence[Sequence[Any]],
    *,
    call: Callable[[nn.Module, Any], Any],
    clip: float = 0.0,
    rate: Callable[[int], float] = lambda _: 1.0,
) -> Trace:
    """`steps[i]` is the list of micro-batches of step i, all ranks' together."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained)
    base = [group["lr"] for group in optimizer.param_groups]
    trace = Trace([], [], {}, {})
    for number, micro_batches in enumerate(steps):
        optimizer.zero_grad(set_to_none=True)
        total, count = 0.0, 0
        for batch in micro_batches:
            value, targets = loss(call(model, batch), batch)
            if value.requires_grad:
                value.backward()
            total, count = total + float(value), count + int(targets)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        for gradient in gradients:
            gradient.div_(count)
        norm = float(torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt())
        trace.losses.append(total / count)
        trace.norms.append(norm)
        trace.gradients = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
        }
        if clip:
            for gradient in gradients:
                gradient.mul_(min(1.0, clip / (norm + 1e-6)))
        for group, lr in zip(optimizer.param_groups, base):
            group["lr"] = lr * rate(number)
        optimizer.step()
    trace.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return trace
