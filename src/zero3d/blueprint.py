"""A model before its weights: the structure, and where each parameter's first values come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from zero3d.computed import computed, is_fake
from zero3d.errors import UsageError

Values = Callable[[], Tensor]
"""Makes the first values of one parameter; may reseed torch's CPU generator."""


@dataclass(frozen=True)
class Blueprint:
    """What `initial.draw` returns. Names are those of `model.named_parameters()`: of a tie, the first."""

    model: nn.Module
    """The structure, complete; parameters may be on meta, buffers are real."""
    values: Mapping[str, Values] = field(repr=False)
    given: frozenset[str]
    """Parameters whose values came with the model instead of from (seed, name): ranks must agree on them, so
    whoever fills broadcasts rank 0's."""
    notice: str = ""
    """Why the whole model had to be built in memory on every rank; empty if it had not."""

    def fill(self, name: str, out: Tensor) -> None:
        """Writes the first values of parameter `name` into `out`: the same shape, any float dtype and device.

        The same (seed, name) gives the same bits, whatever else was filled before. Torch's generators stay as
        they are. A tensor without data (meta, fake) is left alone. Raises `UsageError` for an unknown name or
        another shape.
        """
        if name not in self.values:
            known = list(self.values)
            shown = ", ".join(known[:4]) + (", ..." if len(known) > 4 else "")
            raise UsageError(f"the model has no parameter {name!r}", hint=f"it has {shown}")
        shape = tuple(self.model.get_parameter(name).shape)
        if tuple(out.shape) != shape:
            raise UsageError(
                f"{name} has shape {shape}, not {tuple(out.shape)}", hint="Give a tensor of the parameter's shape."
            )
        if out.is_meta or is_fake(out):
            return
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out.copy_(computed(self.values[name])())


@dataclass(frozen=True)
class Source:
    """A function that builds a model, and another that says where the first values of its parameters are instead.

    Called, it is itself such a function: it gives the model with these values, as plain torch would hold it.
    """

    build: Callable[[], nn.Module]
    values: Callable[[nn.Module], Mapping[str, Values]]
    """The model that `build` made -> by the names of its parameters and buffers, what every rank can make by itself."""

    def __call__(self) -> nn.Module:
        model = self.build()
        state = dict((*model.named_parameters(), *model.named_buffers()))
        with torch.no_grad():
            for name, value in self.values(model).items():
                state[name].copy_(value())
        return model

    def fill(self, blueprint: Blueprint) -> Blueprint:
        """The blueprint of what `build` makes, with these values in place of its own."""
        found = dict(self.values(blueprint.model))
        for name, buffer in blueprint.model.named_buffers():
            if name in found:
                buffer.copy_(found.pop(name)())
        return replace(blueprint, values={**blueprint.values, **found}, given=blueprint.given - found.keys())
