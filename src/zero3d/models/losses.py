"""Cross entropy as a sum over counted targets, with little memory beside the logits. Plain torch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""A target with this value is not counted."""
CHUNK = 1 << 21
"""Logits that are widened to fp32 at a time."""


def next_token_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of cross entropy in nats (fp32) over the targets that are not -100, and their number.

    logits [..., V] of any float dtype; batch["targets"] [...] integers. The gradient is made with the loss, in
    the logits' dtype, and is all that is kept for backward.
    """
    targets = batch["targets"]
    flat = logits.reshape(-1, logits.size(-1))
    total: Tensor = _CrossEntropySum.apply(flat, targets.reshape(-1))  # type: ignore[no-untyped-call]
    return total, (targets != IGNORED).sum()


class _CrossEntropySum(torch.autograd.Function):
    """Rows in chunks of `CHUNK` logits: only a chunk exists in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        rows, vocabulary = logits.shape
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        step = max(1, CHUNK // vocabulary)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            counted = (targets[part] != IGNORED).unsqueeze(1)
            index = targets[part].unsqueeze(1).where(counted, 0)
            log_p = logits[part].float().log_softmax(-1)
            total -= log_p.gather(1, index).mul(counted).sum()
            if gradient is not None:
                p = log_p.exp_()
                p.scatter_add_(1, index, -torch.ones_like(index, dtype=p.dtype))
                gradient[part] = p.mul_(counted)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None
