"""How a batch reaches a model, and how it is cut into micro-batches."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zero3d.contracts import Batch
from zero3d.errors import DataError
from zero3d.trees import map_tensors, tensors_in

Call = Callable[[nn.Module, Batch], Any]
"""call(model, batch) -> the model's output."""


class MicroBatches(list[Batch]):
    """A rank's micro-batches of one step, cut already, such as a loop's that collects them one by one."""


def caller(model: nn.Module, floats: torch.dtype | None) -> Call:
    """The usual way to hand a batch to `model`; `floats`: dtype that floating-point inputs are cast to.

    A dict: as keyword arguments, those that forward names (all if it takes **kwargs). A tuple or list: its first
    member is the input, the rest is the loss's. Anything else: as it is.
    """
    accepted = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters.values()
    names = {parameter.name for parameter in accepted}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted)

    def call(module: nn.Module, batch: Batch) -> Any:
        if isinstance(batch, Mapping):
            chosen = {key: value for key, value in batch.items() if takes_all or key in names}
            if not chosen:
                raise DataError(
                    f"the batch has the keys {', '.join(map(str, batch))}, of which the model's forward takes none",
                    hint=f"It takes {', '.join(names)}. Rename the keys, or pass call=lambda model, batch: ...",
                )
            return module(**_cast(chosen, floats))
        if isinstance(batch, list | tuple):
            return module(_cast(batch[0], floats))
        return module(_cast(batch, floats))

    return call


def split(batch: Batch, size: int | None, device: torch.device) -> list[Batch]:
    """Micro-batches of `size` samples (the last may be smaller), moved to `device`; None: the batch as one.

    No micro-batch where `batch` is None, one without samples where it has none. `MicroBatches` are not cut again."""
    if batch is None:
        return []
    if isinstance(batch, MicroBatches):
        return [map_tensors(lambda tensor: tensor.to(device), one) for one in batch]
    samples = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
    if len(samples) > 1:
        raise DataError(
            f"the tensors of a batch have different numbers of samples: {', '.join(map(str, sorted(samples)))}",
            hint="The first dim of every tensor counts samples.",
        )
    num_samples = samples.pop() if samples else 1
    size = size or max(num_samples, 1)

    def cut(start: int) -> Batch:
        return map_tensors(lambda tensor: (tensor[start : start + size] if tensor.dim() else tensor).to(device), batch)

    return [cut(start) for start in range(0, max(num_samples, 1), size)]


def _cast(value: Any, floats: torch.dtype | None) -> Any:
    if floats is None:
        return value
    return map_tensors(lambda tensor: tensor.to(floats) if tensor.is_floating_point() else tensor, value)
