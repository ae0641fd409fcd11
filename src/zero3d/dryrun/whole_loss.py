"""The cross entropy of language models as counts take it: what `zero3d.cross_entropy` does in chunks of rows, at once.

A count in 64 chunks would take seconds more. It reads, writes and keeps as much; its value means nothing.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero3d.models.losses import Columns, whole
from zero3d.tensor.loss import SplitLogits

SMALL_VOCABULARY = 1 << 14
"""Of so many a chunk is no larger than 16 MB in fp32 with up to 8,192 rows."""


def whole_loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """(a sum, number of targets) of logits [..., V], whole or split over tp, or of an output that has them."""
    logits = output if isinstance(output, Tensor | SplitLogits) else output.logits
    local, columns = (logits.local, logits.columns()) if isinstance(logits, SplitLogits) else (logits, None)
    flat = local.reshape(-1, local.size(-1))
    total: Tensor = _Whole.apply(flat, columns or whole(flat.size(-1)))  # type: ignore[no-untyped-call]
    return total, flat.size(0)


class _Whole(torch.autograd.Function):
    """As `models.losses` goes through the logits of a chunk. With a small vocabulary it stays in a cache:
    memory is read for the logits, and written for their gradient, and one row stands for what is done in between."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Columns) -> Tensor:
        part = logits[:1] if columns.vocabulary <= SMALL_VOCABULARY else logits
        top = logits.amax(1).float()
        p = torch.sub(part, top[: len(part)].unsqueeze(1)).exp_()
        tops, sums, _ = columns.gather(torch.stack([top, p.sum(1).expand(len(top)), top])).unbind(1)
        p.mul_((tops.amax(0) / sums.sum(0))[: len(part)].unsqueeze(1))
        p.masked_fill_(top[: len(part)].isnan().unsqueeze(1), 0)
        gradient = torch.empty_like(logits).copy_(p if len(p) == len(logits) else logits)
        ctx.save_for_backward(gradient)
        return sums.log().sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None
