"""Linear layers whose weights' gradients are computed where they are kept, or later than those of their inputs.

in place  The product of a large weight's gradient goes to where gradients of micro-batches are summed, or onto the sum:
          nothing is allocated for it, copied or added afterwards. Small ones are not worth a call of Python.
later     Backward in two halves: gradients of inputs at once, those of linear layers' weights when they are asked for.
          Linear layers have nearly all of the weights' part of the work; all other gradients come with the inputs'
          half.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero3d.contracts import Place
from zero3d.recompute import in_backward
from zero3d.stand_in import StandIns

LARGE = 1 << 18
"""Elements of weights from which their gradients are computed in place."""


@dataclass(frozen=True, eq=False)
class Half:
    """The gradient of `weight` that is still to be computed; `weight` is what a forward used of `owner`."""

    owner: Tensor
    weight: Tensor
    x: Tensor
    gradient: Tensor


class Linears:
    """Those of one model, and the backwards that go through them."""

    def __init__(self) -> None:
        self.halves: list[Half] | None = None
        """Where backward puts what it leaves for later; None: it computes everything."""
        self._place: Place = _nowhere
        self._in_place: set[int] = set()
        self._later: set[int] = set()
        self._backward = -1
        self._used: set[int] = set()
        self._used_again: set[int] = set()
        self._stand_ins: list[StandIns] = []

    def watch(self, model: nn.Module, place: Place, later: Sequence[nn.Module]) -> None:
        """`place` says where gradients are kept. Layers in the modules `later` can leave their half."""
        stand_ins = StandIns(model)
        self._place = place
        owners = Counter(id(one) for module in model.modules() for one in module._parameters.values())
        leaving = {id(module) for block in later for module in block.modules()}
        for module in list(model.modules()):
            weight = module._parameters.get("weight")  # None where it is computed, as by weight_norm
            if not isinstance(module, nn.Linear) or weight is None:
                continue
            if weight.numel() >= LARGE and owners[id(weight)] == 1:
                self._in_place.add(id(weight))
            if id(module) in leaving:
                self._later.add(id(weight))
            if type(module).forward is nn.Linear.forward and self._has(weight):
                stand_ins.swap(module, _Linear, _linears=self)
        self._stand_ins.append(stand_ins)

    def close(self) -> None:
        for one in self._stand_ins:
            one.close()
        self._place = _nowhere

    def start_forward(self) -> None:
        """What is used from now on is used by another forward."""
        self._used.clear()

    def use(self, weight: Tensor) -> None:
        """A forward uses it; a second time, its gradient is a sum that autograd makes."""
        if not in_backward():
            (self._used_again if id(weight) in self._used else self._used).add(id(weight))

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """torch's own, told from others that may run inside of it, whose gradients are not for parameters."""
        hooks = [output.register_hook(self._begin) for output in outputs]
        try:
            torch.autograd.backward(outputs, gradients)
        finally:
            self._backward = -1
            for hook in hooks:
                hook.remove()

    @contextmanager
    def deferring(self, halves: list[Half]) -> Iterator[None]:
        """A backward inside leaves the gradients of weights in `halves`."""
        self.halves = halves
        try:
            yield
        finally:
            self.halves = None

    @torch.no_grad()
    def finish(self, halves: list[Half]) -> None:
        """Computes what was left for later, and empties the list as it goes: gradients reach their parameters as in any
        backward. Those of a weight that was used several times are added first, as autograd does."""
        used: dict[int, list[Half]] = {}
        for half in halves:
            used.setdefault(id(half.owner), []).append(half)
        halves.clear()
        while used:
            same = used.pop(next(iter(used)))
            first = same.pop(0)
            total = self.product(first.owner, first.gradient, first.x)
            while same:
                half = same.pop(0)
                total += rows(half.gradient).t() @ rows(half.x)
            torch.autograd.backward([first.weight], [total])

    def product(self, weight: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient of `weight` [out, in] for inputs `x` [..., in] and the gradient [..., out] of what they gave; or
        what it adds up to with those before, where those are kept."""
        outer, inner = rows(gradient).t(), rows(x)
        place = self._place(weight, outer.dtype) if self._is_for_parameters(weight) else None
        if place is None:
            return outer @ inner
        kept, adds = place
        if adds:
            torch.addmm(kept, outer, inner, out=kept)
        else:
            torch.mm(outer, inner, out=kept)
        return kept.view_as(kept)  # Of its own, for autograd to take over as it is.

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As torch's own."""
        # What is computed of parameters, as by weight_norm, has a graph that only one backward can go through.
        trains = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf
        if not trains or not self._has(weight) or _is_traced(x):
            return F.linear(x, weight, bias)
        self.use(weight)
        used, owner = weight.view_as(weight), [weight]  # In a list, autograd does not look at it.
        return _Product.apply(x, used, bias, owner, self)  # type: ignore[no-untyped-call, no-any-return]

    def _has(self, weight: Tensor) -> bool:
        return id(weight) in self._in_place or id(weight) in self._later

    def _is_for_parameters(self, weight: Tensor) -> bool:
        """Whether the gradient that is computed now goes from here to `weight`, and nowhere else."""
        ours = torch._C._current_graph_task_id() == self._backward and not torch.is_grad_enabled()
        return ours and id(weight) in self._in_place and id(weight) not in self._used_again

    def _begin(self, _: Tensor) -> None:
        self._backward = torch._C._current_graph_task_id()


class _Linear(nn.Module):
    _linears: Linears
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return self._linears.linear(x, self.weight, self.bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owner: list[Tensor], linears: Linears
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.linears, ctx.used, (ctx.owner,) = linears, weight, owner
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (gradient,) = outer
        x, weight = ctx.saved_tensors
        flat = rows(gradient)
        of_x = (flat @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        of_bias = flat.sum(dim=0) if ctx.needs_input_grad[2] else None
        of_weight = None
        if ctx.linears.halves is None:
            of_weight = ctx.linears.product(ctx.owner, gradient, x)
        else:
            ctx.linears.halves.append(Half(ctx.owner, ctx.used, x, gradient))
        return of_x, of_weight, of_bias, None, None


def rows(x: Tensor) -> Tensor:
    """[..., C] -> [rows, C]"""
    return x.reshape(-1, x.size(-1))


def _is_traced(x: Tensor) -> bool:
    """Whether what is computed here is not what this says: compiled, in another dtype, or under torch.func."""
    return (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled(x.device.type)
        or torch._C._are_functorch_transforms_active()
    )


def _nowhere(weight: Tensor, dtype: torch.dtype) -> None:
    return None
