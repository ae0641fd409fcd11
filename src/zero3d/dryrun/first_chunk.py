"""The cross entropy of language models as counts of memory take it: what `zero3d.cross_entropy` does with the first
chunk of rows. Other chunks take the same memory once more, after it is free again, and time. Its value means nothing.
"""

from typing import Any

import torch
from torch import Tensor

from zero3d.contracts import Batch
from zero3d.models.losses import Columns, Terms, cross_entropy_sum, rows_at_a_time, whole
from zero3d.tensor.loss import SplitLogits
from zero3d.trees import tensors_in


def first_chunk_loss(output: Any, batch: Batch) -> tuple[Tensor, int]:
    """(a sum, number of targets) of logits [..., V], whole or split over tp, or of an output that has them."""
    logits = output if isinstance(output, Tensor | SplitLogits) else output.logits
    local, columns = (logits.local, logits.columns()) if isinstance(logits, SplitLogits) else (logits, None)
    flat = local.reshape(-1, local.size(-1))
    rows = flat.size(0)
    targets = next(one for one in tensors_in(batch) if one.numel() == rows and not one.is_floating_point()).reshape(-1)
    total: Tensor = _FirstChunk.apply(flat, targets, columns or whole(flat.size(-1)))  # type: ignore[no-untyped-call]
    return total, rows


class _FirstChunk(torch.autograd.Function):
    """Holds as much as the whole: a gradient of the first rows, which their losses make, and one of the rest."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, columns: Columns) -> Tensor:
        rows = rows_at_a_time(*logits.shape)
        rest = logits.new_empty(logits.size(0) - rows, logits.size(1))
        with torch.enable_grad():
            first = logits[:rows].detach().requires_grad_()
            total = cross_entropy_sum(first, targets[:rows], columns, Terms(), rows=rows)
        made: Any = total.grad_fn  # What it keeps, without the graph, which would keep the logits.
        ctx.shape, ctx.held = logits.shape, [*made.saved_tensors, rest]
        return total.detach()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        rest = ctx.held[-1]
        gradient = rest.new_empty(ctx.shape)
        ctx.held.clear()
        return gradient, None, None
