"""ParamInfo: the only truth about a parameter. Names are the user's own and never change.

A parameter that several modules share is one ParamInfo: its name is the first in `named_parameters` order,
the others are its `ties`.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from zero3d.slicing import Slicing


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """What the user's model says about one parameter, whatever a rank holds of it.

    slicing: how it is cut over tensor-parallel ranks; None where each has all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    ties: tuple[str, ...] = ()
    slicing: Slicing | None = None

    @property
    def local(self) -> "ParamInfo":
        """The same as this rank's model has it: a parameter of its own right."""
        if self.slicing is None:
            return self
        return dataclasses.replace(self, shape=self.slicing.local_shape(self.shape), slicing=None)

    @property
    def numel(self) -> int:
        return prod(self.shape)


def collect(model: nn.Module) -> list[ParamInfo]:
    """All parameters of `model` in registration order, each once."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    return [
        ParamInfo(
            name=names[key][0],
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            trainable=parameter.requires_grad,
            ties=tuple(names[key][1:]),
        )
        for key, parameter in found.items()
    ]


def owners(model: nn.Module, info: ParamInfo) -> Iterator[tuple[nn.Module, str]]:
    """(module, attribute) of each place where the parameter is registered."""
    for name in (info.name, *info.ties):
        path, _, attribute = name.rpartition(".")
        yield model.get_submodule(path), attribute


def replace(model: nn.Module, info: ParamInfo, parameter: nn.Parameter) -> None:
    """Registers `parameter` in every place of `info`: one object, however many names."""
    for module, attribute in owners(model, info):
        setattr(module, attribute, parameter)
