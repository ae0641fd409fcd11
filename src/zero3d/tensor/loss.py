"""Logits whose vocabulary is cut over tensor-parallel ranks, and the cross entropy of these and of whole logits.

No rank ever holds whole logits: of every row the ranks exchange three or four fp32 numbers (the largest logit, the sum
of exponentials, the target's logit; the sum of logits where labels are smoothed), one gather a chunk of rows. All then
make the same loss of the same numbers in the same order. Each gets the gradient of its own columns without another
call, as the loss, and so its gradient, is the same on every rank. (Shoeybi et al. 2019, section 3.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from zero3d.contracts import Axis
from zero3d.errors import DataError, UsageError
from zero3d.models.losses import IGNORED, Columns, Terms, cross_entropy_sum, whole
from zero3d.tensor.regions import gather


@dataclass(frozen=True, eq=False)
class SplitLogits:
    """Logits [..., V], of which this rank has the columns of its part of the vocabulary.

    local: [..., W], W the same on every rank: columns `axis.index` * W and on of the padded whole
    vocabulary: V, without padding; columns from V on are padding, whatever they hold, and do not count

    Everything else that a tensor has, and every torch function, raises `UsageError`.
    """

    local: Tensor
    vocabulary: int
    axis: Axis

    def __post_init__(self) -> None:
        assert self.local.size(-1) * self.axis.size >= self.vocabulary, "columns are missing"

    @property
    def shape(self) -> torch.Size:
        """Of the whole logits."""
        return torch.Size((*self.local.shape[:-1], self.vocabulary))

    def whole(self) -> Tensor:
        """All columns, without padding, on every rank. Collective. Can be differentiated, where what is made of them,
        and so their gradient, is the same on every rank."""
        return gather(self.local, self.axis, -1, "logits")[..., : self.vocabulary]

    def columns(self) -> Columns:
        def everyone(mine: Tensor) -> Tensor:
            out = mine.new_empty(self.axis.size, *mine.shape)
            self.axis.all_gather(out.view(-1), mine.view(-1), "cross entropy").wait()
            return out

        return Columns(vocabulary=self.vocabulary, index=self.axis.index, gather=everyone)

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name) and not name.startswith("__"):
            _refuse(f"their `{name}`")
        raise AttributeError(f"SplitLogits has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(f"torch's `{getattr(function, '__name__', function)}`")

    def _operator(self, *_: object) -> NoReturn:
        _refuse("an operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _operator
    __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __float__ = _operator


def cross_entropy(
    logits: Tensor | SplitLogits,
    targets: Tensor,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(the sum of cross entropy over the targets that are not `ignore_index`, in nats and fp32; their number).

    logits: [..., V] of any float dtype, whole or split over tensor-parallel ranks (then collective over these)
    targets: [...] integers from 0 to V - 1, or `ignore_index`
    label_smoothing: as in torch.nn.functional.cross_entropy
    z_loss: the factor of the sum of squared logsumexp over the same targets (Chowdhery et al. 2022, section 5)

    The gradient is made with the loss, in the logits' dtype, and is all that is kept for backward. The loss has the
    same bits on all ranks that split the vocabulary. Raises `UsageError` for arguments that do not fit.
    """
    terms = Terms(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss)
    _check(logits, targets, terms)
    if isinstance(logits, SplitLogits):
        local, columns = logits.local, logits.columns()
    else:
        local, columns = logits, whole(logits.size(-1))
    try:
        total = cross_entropy_sum(local, targets, columns, terms)
    except (RuntimeError, IndexError) as error:
        _explain(error, targets, logits.shape[-1], terms)
        raise
    return total, (targets != ignore_index).sum()


def whole_logits(output: Any) -> Any:
    """A model's output without split logits: whole ones in their place. Collective."""
    if isinstance(output, SplitLogits):
        return output.whole()
    if isinstance(output, Mapping):
        return {key: whole_logits(one) for key, one in output.items()}
    if type(output) in (list, tuple):
        return type(output)(whole_logits(one) for one in output)
    return output


def next_token_loss(logits: Tensor | SplitLogits, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`cross_entropy` of batch["targets"]: the loss that the command trains with."""
    return cross_entropy(logits, batch["targets"])


def _check(logits: Tensor | SplitLogits, targets: Tensor, terms: Terms) -> None:
    if not isinstance(logits, Tensor | SplitLogits):
        raise UsageError(
            f"cross_entropy was given logits of type {type(logits).__name__}",
            hint="Give the tensor itself, such as output.logits.",
        )
    if not 0 <= terms.label_smoothing <= 1 or terms.z_loss < 0:
        raise UsageError(
            f"cross_entropy was given label_smoothing {terms.label_smoothing} and z_loss {terms.z_loss}",
            hint="label_smoothing is from 0 to 1, z_loss is not negative; 1e-4 is usual.",
        )
    if logits.shape[:-1] != targets.shape or targets.is_floating_point():
        what = f"{str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}"
        raise DataError(
            f"targets are {what}, logits {list(logits.shape)}",
            hint=f"For these logits targets are integers of shape {list(logits.shape[:-1])}.",
        )


def _explain(error: Exception, targets: Tensor, vocabulary: int, terms: Terms) -> None:
    """Targets are looked at once something failed: before, it would be to wait for the device."""
    if targets.device.type != "cpu":
        return  # A device that failed answers no more.
    wrong = targets[(targets != terms.ignore_index) & ((targets < 0) | (targets >= vocabulary))]
    if len(wrong):
        raise DataError(
            f"{len(wrong)} targets are none of {vocabulary} classes, such as {int(wrong[0])}",
            hint=f"Targets are from 0 to {vocabulary - 1}, or {terms.ignore_index} where they do not count.",
        ) from error


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"the logits are split over tp, and {what} would need them whole",
        hint="Use zero3d.cross_entropy(logits, targets), or logits.whole(), which gathers them, or give the module "
        'that makes them the style "colwise_gather_output" in parallel.plan.',
    )
