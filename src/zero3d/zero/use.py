"""Level 3: who uses which weights, and when. Forward hooks and gradient hooks; no graph is changed.

A unit uses its weights from before its forward to after it, and again from the moment the gradient of its output
is known to the moment the gradients of its inputs are. Blocks are gathered ahead in the order of the forward
before. The modules outside the blocks are held by the whole forward, and again by the whole backward: their
gathers start at these two fixed points on every rank, so ranks may take different branches among them. So are the
parameters of `zero.keep_gathered`, whatever block they are in.
A forward inside a backward is a recomputation: its gathers follow no order of their own. What it computes may be
differentiated at once (reentrant checkpointing) or never (the other kind); both come out right, as a visit that is
never differentiated holds nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from zero3d.recompute import in_backward, untraced
from zero3d.trees import needing_grad, tensors_in, tensors_on
from zero3d.zero.units import Unit

Names = tuple[str, ...]


class Store(Protocol):
    """What `GatheredWeights` offers: all take parameter names."""

    def hold(self, names: Names) -> None: ...
    def take(self, names: Names) -> None: ...
    def drop(self, names: Names) -> None: ...
    def start(self, names: Names) -> None: ...


class Visit:
    """One forward of a unit and the backwards that belong to it.

    The gradients of its inputs tell when a backward is over. Where they cannot, it `lingers` until the backward of
    another visit begins, or `lasts` until the turn is over.
    """

    __slots__ = ("_in_backward", "_uses", "before", "lasts", "lingers", "names", "root")

    def __init__(self, uses: "Uses", names: Names, before: "Visit | None", root: "Visit | None") -> None:
        self._uses = uses
        self.names = names
        self.before = before
        self.root = root
        self.lingers = False
        self.lasts = False
        self._in_backward = False

    def begin_backward(self, *_: Any) -> None:
        if self.root is not None and not self.root._in_backward:
            self.root.begin_backward()
        if not self._in_backward:
            self._in_backward = True
            self._uses.began(self)

    def end_backward(self, *_: Any) -> None:
        if self._in_backward and not self.lasts:
            self.over()

    def over(self) -> None:
        self._in_backward = False
        self._uses.ended(self)


class Uses:
    """Watches the forwards of `model` and its units."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], store: Store, prefetch: int) -> None:
        self._store = store
        self._prefetch = prefetch
        self._outside = [name for unit in units for name in unit.kept]
        # Ranks may run different ones of these, and none may gather ahead what another does not.
        self._fixed = {unit for unit in units if set(unit.needs) <= set(self._outside)}
        self._order: list[Names] = []
        self._seen: list[Names] = []
        self._root: Visit | None = None
        self._last: Visit | None = None
        self._open: dict[Visit, None] = {}
        self._lent: list[str] = []
        self._inside: list[tuple[Unit, list[tuple[Tensor, Any]]]] = []
        self._modules = {unit: tuple(unit.module.modules()) for unit in units}
        blocks = {id(module) for unit in units if unit.is_block for module in self._modules[unit]}
        self._outside_modules = [module for module in model.modules() if id(module) not in blocks]
        self._aside: dict[nn.Module, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        hook = untraced(model)
        for unit in units:
            enter, leave = self._hooks_of(unit)
            self._hooks += [
                unit.module.register_forward_pre_hook(hook(enter), with_kwargs=True, prepend=True),
                unit.module.register_forward_hook(hook(leave), always_call=True),
            ]
        self._hooks += [
            model.register_forward_pre_hook(hook(self._enter_model), prepend=True),
            model.register_forward_hook(hook(self._leave_model), always_call=True),
        ]

    @property
    def outside(self) -> Names:
        """What a forward holds from its beginning to its end."""
        return tuple(self._outside)

    def close(self) -> None:
        """Watches no more."""
        for hook in self._hooks:
            hook.remove()

    def end_turn(self) -> None:
        for visit in list(self._open):
            visit.over()
        self._return(self._lent)
        self._last = None
        self._aside.clear()

    def began(self, visit: Visit) -> None:
        # Autograd runs what was computed later first: when an earlier unit's backward begins, a later one's is over.
        for other in (*self._open,):
            if other.lingers and other is not visit.root:
                other.over()
        self._open[visit] = None
        self._store.take(visit.names)
        if self._lent:
            self._return([name for name in self._lent if name in visit.names])
        # Differentiated inside the forward, or with a graph of its own: what comes of it may be differentiated again.
        visit.lasts |= self._root is not None or torch.is_grad_enabled()
        ahead = visit.before
        for _ in range(self._prefetch):
            if ahead is not None:
                self._store.start(ahead.names)
                ahead = ahead.before

    def ended(self, visit: Visit) -> None:
        del self._open[visit]
        self._store.drop(visit.names)

    def borrow(self, name: str) -> bool:
        """Weights are touched outside the forward and backward of the module that owns them.

        In a forward: the model holds them from now on. In a backward (by a hook of the user's): until their module's
        backward begins, or the turn is over.
        """
        if in_backward():
            if self._open:
                self._lent.append(name)
                self._store.take((name,))
            return bool(self._open)
        if self._root is None:
            return False
        self._outside.append(name)
        self._root.names = (*self._root.names, name)
        self._store.take((name,))
        return True

    def _return(self, names: Sequence[str]) -> None:
        for name in list(names):
            self._lent.remove(name)
            self._store.drop((name,))

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        if in_backward():
            return
        self._root = Visit(self, tuple(self._outside), None, None)
        self._last = None
        self._order, self._seen = self._seen, []
        self._store.hold(self._root.names)
        for names in self._order[: self._prefetch]:
            self._store.start(names)

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or self._root is None:
            return
        visit, self._root = self._root, None
        self._store.drop(visit.names)
        while self._inside:  # The end of a pipeline stage leaves the modules round its blocks without their hooks.
            entered, _ = self._inside.pop()
            self._store.drop(entered.needs)
        for tensor in [*needing_grad(tensors_in(output)), *self._put_aside(self._outside_modules)]:
            tensor.register_hook(visit.begin_backward)

    def _put_aside(self, modules: Sequence[nn.Module]) -> list[Tensor]:
        """Tensors that a forward left as attributes of its modules, such as an auxiliary loss: outputs too."""
        found = []
        for module in modules:
            for value in tensors_on(module):
                if value.grad_fn is not None and self._aside.get(module) is not value:
                    self._aside[module] = value
                    found.append(value)
        return found

    def _hooks_of(self, unit: Unit) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._enter(unit, args, kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._leave(unit, output)

        return enter, leave

    def _enter(self, unit: Unit, args: Any, kwargs: Any) -> None:
        inputs = needing_grad(tensors_in((*args, *kwargs.values())))
        self._inside.append((unit, [(tensor, tensor.grad_fn) for tensor in inputs]))
        self._store.take(unit.needs)
        if self._root is None or unit in self._fixed or in_backward():
            return
        self._seen.append(unit.needs)
        position = len(self._seen)
        if self._order[position - 1 : position] == [unit.needs]:
            for names in self._order[position : position + self._prefetch]:
                self._store.start(names)

    def _leave(self, unit: Unit, output: Any) -> None:
        while self._inside:
            entered, inputs = self._inside.pop()
            self._store.drop(entered.needs)
            if entered is unit:
                break
        else:
            return
        if not torch.is_grad_enabled() or (output is None and in_backward()):
            return  # A recomputation stops, without an output, where all is there that was wanted.
        found = list(tensors_in(output))
        outputs = [*needing_grad(found), *self._put_aside(self._modules[unit])]
        visit = Visit(self, unit.needs, self._last, self._root)
        if not found or any(_is_wrapped(tensor) for tensor in found):
            # Its backward cannot be seen coming: the weights stay until the turn is over.
            visit.lasts = True
            visit.begin_backward()
            return
        if not outputs:
            return
        if not in_backward() and unit not in self._fixed:
            self._last = visit
        for tensor in outputs:
            tensor.register_hook(visit.begin_backward)
        # A leaf's gradient does not wait for what else the unit computed, and an input that was written to has
        # become an output.
        if inputs and all(made is not None and tensor.grad_fn is made for tensor, made in inputs):
            if len(inputs) == 1:
                inputs[0][0].register_hook(visit.end_backward)
            else:
                register_multi_grad_hook([tensor for tensor, _ in inputs], visit.end_backward, mode="all")
        else:
            visit.lingers = bool(inputs)


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether a function transform such as vmap stands between the tensor and autograd."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
