"""Cross entropy as a sum over counted targets, with little memory beside the logits. Plain torch.

There is one arithmetic for whole logits and for logits of which this process has some columns: each part of the
vocabulary is brought down to a few numbers a row, and the numbers of all parts make the loss. Whole logits are the
only part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""A target with this value is not counted."""
CHUNK = 1 << 21
"""Logits that are widened to fp32 at a time, beside a share of all: one that stays in a CPU's caches."""
SHARES = 64
"""Of all logits: not more chunks than that, as a GPU, which a chunk takes some 30 launches, waits for launches else."""
LOWEST = torch.finfo(torch.float32).min
"""The largest logit of a row that has none: unlike -inf it can be subtracted from -inf."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is summed: of logits x over V classes, p = softmax(x), and a target t that is not `ignore_index`,

        (1 - a) * -log p[t]  +  a * mean of -log p  +  z * logsumexp(x)**2

    a: `label_smoothing` (Szegedy et al. 2016, section 7); z: `z_loss` (Chowdhery et al. 2022, section 5).
    """

    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which logits are here: part `index` of equal parts of `vocabulary` columns, the last parts filled up with
    padding. `gather`: my numbers [k, rows], fp32 -> those of all parts [parts, k, rows]."""

    vocabulary: int
    index: int
    gather: Callable[[Tensor], Tensor]


def next_token_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of cross entropy in nats (fp32) over the targets that are not -100, and their number.

    logits [..., V] of any float dtype; batch["targets"] [...] integers. The gradient is made with the loss, in
    the logits' dtype, and is all that is kept for backward.
    """
    targets = batch["targets"]
    return cross_entropy_sum(logits, targets, whole(logits.size(-1)), Terms()), (targets != IGNORED).sum()


def rows_at_a_time(rows: int, width: int) -> int:
    """Of logits [rows, width], those of a chunk. A sum of `CHUNK` and a share, so that memory grows in a line."""
    return max(1, min(rows, CHUNK // width + rows // SHARES))


def whole(vocabulary: int) -> Columns:
    """All columns, without padding."""
    return Columns(vocabulary=vocabulary, index=0, gather=lambda mine: mine.unsqueeze(0))


def cross_entropy_sum(
    logits: Tensor, targets: Tensor, columns: Columns, terms: Terms, *, rows: int | None = None
) -> Tensor:
    """logits [..., W], of which `columns` tells what they are; targets [...] of all columns -> the sum, fp32.
    rows: of a chunk, `rows_at_a_time` where it is None."""
    flat = logits.reshape(-1, logits.size(-1))
    step = rows_at_a_time(*flat.shape) if rows is None else rows
    total: Tensor = _CrossEntropySum.apply(flat, targets.reshape(-1).long(), columns, terms, step)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropySum(torch.autograd.Function):
    """`step` rows at a time: only such a chunk exists in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, columns: Columns, terms: Terms, step: int) -> Tensor:
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for start in range(0, logits.size(0), step):
            part = slice(start, start + step)
            into = None if gradient is None else gradient[part]
            total += _losses(logits[part], targets[part], columns, terms, into).sum()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        if torch.is_grad_enabled():  # With create_graph; the second derivative would silently lack this loss.
            raise RuntimeError(
                "The gradient of this cross entropy was made in forward and cannot be differentiated again. "
                "Use torch.nn.functional.cross_entropy where create_graph=True is needed."
            )
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None


def _losses(logits: Tensor, targets: Tensor, columns: Columns, terms: Terms, gradient: Tensor | None) -> Tensor:
    """The losses of some rows, [rows]; their gradient into `gradient`, [rows, W]."""
    width, vocabulary, smoothing = logits.size(1), columns.vocabulary, terms.label_smoothing
    first = columns.index * width
    real = min(max(vocabulary - first, 0), width)
    counted = targets != terms.ignore_index
    here = counted & (targets >= first) & (targets < first + real)
    # The lookup refuses a target that is no class, on every rank alike.
    unknown = counted & ((targets < 0) | (targets >= vocabulary))
    place = (targets - first).where(here, 0).masked_fill(unknown, -1).unsqueeze(1)

    # A part may be padding alone; a row of -inf alone has no largest logit either.
    top = logits[:, :real].amax(1).float() if real else torch.full_like(targets, LOWEST, dtype=torch.float32)
    top.clamp_min_(LOWEST)
    at_target = logits.gather(1, place).squeeze(1).float().where(here, 0)
    p = torch.sub(logits, top.unsqueeze(1)).float()
    p[:, real:] = -torch.inf
    sums = [p[:, :real].sum(1)] if smoothing else []
    p.exp_()
    tops, exps, at_targets, *shifted = columns.gather(torch.stack([top, p.sum(1), at_target, *sums])).unbind(1)

    highest = tops.amax(0)
    share = (tops - highest).exp()
    total = _in_order(exps * share)
    log_total = total.log()
    losses = log_total - (_in_order(at_targets) - highest)
    if smoothing:
        starts = torch.arange(len(tops), device=logits.device) * width
        sizes = (vocabulary - starts).clamp(0, width).unsqueeze(1)
        mean = _in_order(shifted[0] + sizes * (tops - highest)) / vocabulary
        losses = (1 - smoothing) * losses + smoothing * (log_total - mean)
    log_z = highest + log_total
    if terms.z_loss:
        losses = losses + terms.z_loss * log_z.square()
    if gradient is not None:
        p.mul_(((1 + 2 * terms.z_loss * log_z) * share[columns.index] / total).unsqueeze(1))
        if smoothing:
            p[:, :real].sub_(smoothing / vocabulary)
        p.scatter_add_(1, place, here.float().mul_(smoothing - 1).unsqueeze(1))
        gradient.copy_(p.masked_fill_(~counted.unsqueeze(1), 0))
    return losses.where(counted, 0)


def _in_order(parts: Tensor) -> Tensor:
    """[parts, rows] -> their sum, part by part: the same bits wherever it is added up."""
    return reduce(torch.add, parts.unbind(0))
