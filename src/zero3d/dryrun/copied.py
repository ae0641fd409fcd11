"""A user's module with values is rehearsed as a copy without them: its own parameters are left as they are."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from zero3d.contracts import ModelSource


def copied(source: ModelSource) -> ModelSource:
    """What to rehearse in the place of `source`. A function, or a module without values, is that itself."""
    if not isinstance(source, nn.Module) or all(one.is_meta for one in source.parameters()):
        return source
    return _builder(source)


def _builder(module: nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        tensors: dict[int, Tensor] = {id(one): _zeros(one) for one in module.buffers()}
        # Registered once, as by a constructor, so that whoever watches the model being built sees each of them.
        holder = nn.Module()
        for at, one in enumerate(module.parameters()):
            holder.register_parameter(str(at), nn.Parameter(_zeros(one), requires_grad=one.requires_grad))
            tensors[id(one)] = holder.get_parameter(str(at))
        # What `deepcopy` finds here it takes for copied already: no value is read, and what else a module keeps of its
        # parameters, such as the list of `nn.LSTM`, is of the same.
        return deepcopy(module, tensors)

    return build


def _zeros(tensor: Tensor) -> Tensor:
    """Integers keep their values, by which a model may look up and mask."""
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
