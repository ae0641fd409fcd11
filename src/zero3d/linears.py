"""Linear layers whose weights' gradients are computed where they are kept, or later than those of their inputs.

in place  The product of a large weight's gradient goes to where gradients of micro-batches are summed, or onto the sum:
          nothing is allocated for it, copied or added afterwards. Small ones are not worth a call of Python.
later     Backward in two halves: gradients of inputs at once, those of linear layers' weights when they are asked for.
          Linear layers have nearly all of the weights' part of the work; all other gradients come with the inputs'
          half.

Modules stay what they are: a hook behind the forward gives the output another way back.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as all_modules
from torch.utils.hooks import RemovableHandle

from zero3d.contracts import Place
from zero3d.recompute import in_backward

LARGE = 1 << 18
"""Elements of weights from which their gradients are computed in place."""


@dataclass(slots=True)
class Uses:
    """How often one forward uses a weight: where it is more than once, its gradient is a sum that autograd makes."""

    number: int = 1


@dataclass(frozen=True, eq=False)
class Half:
    """The gradient of `weight` that is still to be computed; `weight` is what a forward used of `owner`."""

    owner: Tensor
    weight: Tensor
    x: Tensor
    gradient: Tensor
    uses: Uses


class Linears:
    """Those of one model, and the backwards that go through them."""

    def __init__(self) -> None:
        self.halves: list[Half] | None = None
        """Where backward puts what it leaves for later; None: it computes everything."""
        self._place: Place = _nowhere
        self._in_place: set[int] = set()
        self._backward = -1
        self._uses: dict[int, Uses] = {}
        self._hooks: list[RemovableHandle] = []

    def watch(self, model: nn.Module, place: Place, later: Sequence[nn.Module]) -> None:
        """`place` says where gradients are kept. Layers in the modules `later` can leave their half."""
        self._place = place
        owners = Counter(id(one) for module in model.modules() for one in module._parameters.values())
        leaving = {id(module) for block in later for module in block.modules()}
        for module in model.modules():
            weight = module._parameters.get("weight")  # None where it is computed, as by weight_norm
            if not isinstance(module, nn.Linear) or weight is None:
                continue
            large = weight.numel() >= LARGE and owners[id(weight)] == 1
            if large:
                self._in_place.add(id(weight))
            if type(module).forward is nn.Linear.forward and (large or id(module) in leaving):
                way_back = _WayBack(self)
                handle = module.register_forward_hook(way_back, with_kwargs=True, prepend=True)
                way_back.number = handle.id
                self._hooks.append(handle)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._place = _nowhere

    def start_forward(self) -> None:
        """What is used from now on is used by another forward."""
        self._uses = {}

    def use(self, weight: Tensor) -> Uses:
        """A forward uses it."""
        if in_backward():  # What is computed again has been counted, or is a backward inside of another.
            return Uses(2)
        uses = self._uses.get(id(weight))
        if uses is None:
            uses = self._uses[id(weight)] = Uses()
        else:
            uses.number += 1
        return uses

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
            total = self.product(first.owner, first.gradient, first.x, first.uses)
            while same:
                half = same.pop(0)
                total += rows(half.gradient).t() @ rows(half.x)
            torch.autograd.backward([first.weight], [total])

    def product(self, weight: Tensor, gradient: Tensor, x: Tensor, uses: Uses) -> Tensor:
        """The gradient of `weight` [out, in] for inputs `x` [..., in] and the gradient [..., out] of what they gave; or
        what it adds up to with those before, where those are kept."""
        outer, inner = rows(gradient).t(), rows(x)
        # Whether what is computed now goes from here to the parameter, and nowhere else.
        ours = torch._C._current_graph_task_id() == self._backward and not torch.is_grad_enabled()
        found = ours and uses.number == 1 and id(weight) in self._in_place
        place = self._place(weight, outer.dtype) if found else None
        if place is None:
            return outer @ inner
        kept, adds = place
        if adds:
            torch.addmm(kept, outer, inner, out=kept)
        else:
            torch.mm(outer, inner, out=kept)
        return kept.view_as(kept)  # Of its own, for autograd to take over as it is.

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`F.linear` without bias, and with the way back."""
        y = F.linear(x, weight)
        return self.with_way_back(x, weight, None, y) if id(weight) in self._in_place else y

    def with_way_back(self, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
        """`y`, which is F.linear(x, weight, bias): its backward goes by here. `y` itself where that is not possible."""
        # What is computed of parameters, as by weight_norm, has a graph that only one backward can go through.
        trains = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf
        if not trains or not _is_plain(x, y):
            return y
        uses = self.use(weight)
        used, aside = weight.view_as(weight), _Aside(weight, y.data, uses)  # Autograd does not look at it.
        return _Product.apply(x, used, bias, aside, self)  # type: ignore[no-untyped-call, no-any-return]

    def _begin(self, _: Tensor) -> None:
        self._backward = torch._C._current_graph_task_id()


@dataclass(frozen=True, eq=False, slots=True)
class _Aside:
    owner: Tensor
    y: Tensor
    uses: Uses


@dataclass(eq=False)
class _WayBack:
    """The hook of a linear layer. A copy of it, on a copy of the layer, does nothing."""

    linears: Linears | None = field(repr=False)
    number: int = -1

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> Tensor | None:
        if self.linears is None or torch.compiler.is_compiling():
            return None
        # Others may have changed what the forward gave; those of this kind change gradients as they are computed.
        is_first = next(iter(module._forward_hooks)) == self.number and not all_modules._global_forward_hooks
        has_old_hooks = bool(module._backward_hooks) and not module._is_full_backward_hook
        if not is_first or has_old_hooks or "forward" in module.__dict__:
            return None
        x = args[0] if args else kwargs["input"]
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
        return self.linears.with_way_back(x, weight, bias, y)

    def __deepcopy__(self, memo: Any) -> "_WayBack":
        return _WayBack(None)

    def __reduce__(self) -> tuple[type["_WayBack"], tuple[None]]:
        return _WayBack, (None,)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, aside: _Aside, linears: Linears) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.linears, ctx.used, ctx.owner, ctx.uses = linears, weight, aside.owner, aside.uses
        return aside.y

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (gradient,) = outer
        x, weight = ctx.saved_tensors
        flat = rows(gradient)
        of_x = (flat @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        of_bias = flat.sum(dim=0) if ctx.needs_input_grad[2] else None
        of_weight = None
        if ctx.linears.halves is None:
            of_weight = ctx.linears.product(ctx.owner, gradient, x, ctx.uses)
        else:
            # With its graph x would keep what came into the stage, and the gradient of that.
            ctx.linears.halves.append(Half(ctx.owner, ctx.used, x.detach(), gradient, ctx.uses))
        return of_x, of_weight, of_bias, None, None


def rows(x: Tensor) -> Tensor:
    """[..., C] -> [rows, C]"""
    return x.reshape(-1, x.size(-1))


def _is_plain(x: Tensor, y: Tensor) -> bool:
    """Whether a linear layer's backward is what this module says: not in another dtype or layout, nor transformed."""
    return (
        x.dtype == y.dtype
        and x.layout is torch.strided
        and not x.is_nested
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _nowhere(weight: Tensor, dtype: torch.dtype) -> None:
    return None
