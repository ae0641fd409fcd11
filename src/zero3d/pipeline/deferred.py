"""Backward in two halves: gradients of inputs at once, gradients of linear layers' weights when they are asked for.

Linear layers have nearly all of the weights' part of the work; all other gradients come with the inputs' half.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zero3d.stand_in import StandIns


@dataclass(frozen=True, eq=False)
class Half:
    """The gradient of `weight` that is still to be computed; `weight` is what a forward used of `owner`."""

    owner: Tensor
    weight: Tensor
    x: Tensor
    gradient: Tensor


class Deferral:
    """Where backward puts what it leaves for later; None: it computes everything."""

    def __init__(self) -> None:
        self._halves: list[Half] | None = None
        self._stand_ins: list[StandIns] = []

    @property
    def halves(self) -> list[Half] | None:
        return self._halves

    @contextmanager
    def deferring(self, halves: list[Half]) -> Iterator[None]:
        """A backward inside leaves the gradients of weights in `halves`."""
        self._halves = halves
        try:
            yield
        finally:
            self._halves = None

    def watch(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Linear layers in `blocks` can leave their half."""
        stand_ins = StandIns(model)
        for block in blocks:
            for module in list(block.modules()):
                if type(module).forward is nn.Linear.forward:
                    stand_ins.swap(module, _Linear, _deferral=self)
        self._stand_ins.append(stand_ins)

    def close(self) -> None:
        for one in self._stand_ins:
            one.close()


def finish(halves: list[Half]) -> None:
    """Computes what was left for later, and empties the list as it goes: gradients reach their parameters as in any
    backward. Those of a weight that was used several times are added first, as autograd does."""
    used: dict[int, list[Half]] = {}
    for half in halves:
        used.setdefault(id(half.owner), []).append(half)
    halves.clear()
    while used:
        same = used.pop(next(iter(used)))
        weight, total = same[0].weight, _of_weight(same.pop(0))
        while same:
            total += _of_weight(same.pop(0))
        torch.autograd.backward([weight], [total])


def _of_weight(half: Half) -> Tensor:
    return _rows(half.gradient).t() @ _rows(half.x)


class _Linear(nn.Module):
    _deferral: Deferral
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        # What is computed of parameters, as by weight_norm, has a graph that only one backward can go through.
        if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
            return F.linear(x, weight, self.bias)
        used, owner = weight.view_as(weight), [weight]  # In a list, autograd does not look at it.
        return _Product.apply(x, used, self.bias, owner, self._deferral)  # type: ignore[no-untyped-call, no-any-return]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owner: list[Tensor], deferral: Deferral
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferral, ctx.used, (ctx.owner,) = deferral, weight, owner
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (gradient,) = outer
        x, weight = ctx.saved_tensors
        rows = _rows(gradient)
        of_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        of_bias = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        of_weight = None
        if ctx.deferral.halves is None:
            of_weight = rows.t() @ _rows(x)
        else:
            ctx.deferral.halves.append(Half(ctx.owner, ctx.used, x, gradient))
        return of_x, of_weight, of_bias, None, None


def _rows(x: Tensor) -> Tensor:
    """[..., C] -> [rows, C]"""
    return x.reshape(-1, x.size(-1))
