"""Linear layers of which each rank has some of the columns, or of the rows.

A column's backward gives the gradient of its input first and that of its weight later, while the former is on its way
to be summed: autograd runs what was made later first, and the nodes are made in this order.

    forward    opened   later(w_q) later(w_k) later(w_v)   entered   q   k   v
    backward   v   k   q   entered: starts the sum   w_v   w_k   w_q   opened: waits for it

With sequence parallelism `entered` gathers the sequence, and its backward scatters the sum. The gathered input is not
kept for the gradients of weights but gathered once more, while gradients of inputs are computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zero3d.contracts import Axis
from zero3d.linears import Linears, Uses, rows
from zero3d.tensor.regions import SEQUENCE, Flight, entered, gathered_summed, opened, start_gather


@dataclass(frozen=True, eq=False)
class Column:
    """A linear layer that is cut. `transposed`: its weight is [in, out]."""

    module: nn.Module
    linears: Linears
    transposed: bool

    @property
    def weight(self) -> Tensor:
        """[out / t, in]"""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight.t() if self.transposed else weight

    def linear(self, x: Tensor) -> Tensor:
        """Without bias."""
        return F.linear(x, self.weight) if self.transposed else self.linears.linear(x, self.weight)

    def gradient(self, x: Tensor, outer: Tensor, uses: Uses) -> Tensor:
        """Of the weight, for inputs `x` and the gradient of what they gave."""
        return rows(outer).t() @ rows(x) if self.transposed else self.linears.product(self.weight, outer, x, uses)


class Ticket:
    """What the gradient of one weight is to be computed from."""

    __slots__ = ("column", "entry", "gradient", "uses", "x")

    def __init__(self, entry: "Entry", column: Column) -> None:
        self.entry = entry
        self.column = column
        self.uses = column.linears.use(column.weight)
        self.x: Tensor | None = None
        self.gradient: Tensor | None = None

    def redeem(self) -> Tensor:
        assert self.x is not None and self.gradient is not None
        x, gradient = self.entry.whole(self.x), self.gradient
        self.x = self.gradient = None
        return self.column.gradient(x, gradient, self.uses)


class Entry:
    """A tensor on its way into columns: those of one module that take the same tensor share it.

    x: [..., T, C], or [..., T / t, C] where the sequence is cut and `gathers`. `own`: only columns take `inside`.
    """

    def __init__(
        self, x: Tensor, axis: Axis, columns: Sequence[Column], label: str, *, gathers: bool, own: bool = True
    ) -> None:
        self._axis = axis
        self._label = label
        self._gathers = gathers
        self._again: Flight | None = None
        self._gathered: Tensor | None = None
        self._users = 0
        self.outer = ref(x)
        self.inside: Tensor
        self.part = x.detach() if gathers else None
        self._later: dict[Column, tuple[Tensor, Ticket]] = {}
        if not torch.is_grad_enabled():
            self.inside = start_gather(x, axis, SEQUENCE, label).land() if gathers else x
            return
        flight = Flight()
        x = opened(x, flight)
        for column in columns:
            if column.weight.requires_grad:
                ticket = Ticket(self, column)
                self._later[column] = _Later.apply(column.weight, ticket), ticket  # type: ignore[no-untyped-call]
        if gathers:
            self.inside = gathered_summed(x, axis, flight, label)
        else:
            self.inside = entered(x, axis, flight, label, own=own)

    def column(self, x: Tensor, column: Column, bias: Tensor | None) -> Tensor:
        """`x` is `inside`, or something made of it. -> [..., out / t]"""
        weight, ticket = self._later.pop(column, (column.weight, None))
        if ticket is None or x is not self.inside:
            return F.linear(x, column.weight, bias)
        return _Column.apply(x, self.part, weight, bias, ticket)  # type: ignore[no-untyped-call, no-any-return]

    def ask(self, part: Tensor) -> None:
        """The whole of `part` will be wanted once more; all columns ask before the first of them gets it."""
        self._users += 1
        if self._gathers and self._again is None and self._gathered is None:
            self._again = start_gather(part, self._axis, SEQUENCE, f"{self._label}, again")

    def whole(self, part: Tensor) -> Tensor:
        self._users -= 1
        if not self._gathers:
            return part
        if self._again is not None:
            self._gathered, self._again = self._again.land(), None
        assert self._gathered is not None
        whole = self._gathered
        if not self._users:
            self._gathered = None
        return whole


class Door:
    """Finds the entry of a tensor that columns take one after the other."""

    def __init__(self) -> None:
        self._entry: Entry | None = None

    def open(self, x: Tensor, make: Callable[[], Entry]) -> Entry:
        """The entry that `x` has come in by, or is what has come in; else what `make` makes."""
        entry = self._entry
        if entry is None or not (entry.outer() is x or entry.inside is x):
            entry = self._entry = make()
        return entry

    def find(self, x: Tensor) -> Entry | None:
        entry = self._entry
        return entry if entry is not None and entry.inside is x else None

    def shut(self) -> None:
        self._entry = None


class _Later(torch.autograd.Function):
    """The weight, whose gradient is computed when its turn comes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket = ticket
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return ctx.ticket.redeem(), None


class _Column(torch.autograd.Function):
    """`part`: what is kept in place of `x`; the weight's gradient is but a promise."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, part: Tensor | None, weight: Tensor, bias: Tensor | None, ticket: Ticket
    ) -> Tensor:
        ctx.save_for_backward(x if part is None else part, weight)
        ctx.ticket = ticket
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (gradient,) = outer
        kept, weight = ctx.saved_tensors
        ctx.ticket.x, ctx.ticket.gradient = kept, gradient
        ctx.ticket.entry.ask(kept)
        x = gradient @ weight if ctx.needs_input_grad[0] else None
        bias = rows(gradient).sum(dim=0) if ctx.needs_input_grad[3] else None
        return x, None, gradient.new_empty(1).expand(weight.shape), bias, None
