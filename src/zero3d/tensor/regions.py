"""Where activations change between whole and cut over the tensor-parallel ranks: conjugate pairs of autograd functions.

                        forward                                     backward
    reduce              sum over ranks                              as it is
    enter               as it is                                    sum over ranks          (of columns' inputs)
    gather              parts of a dim side by side                 my part
    split               my part of a dim                            parts side by side
    gather_summed       parts of the sequence side by side          my part of the sum over ranks
    reduce_scattered    my part, along the sequence, of the sum     parts side by side

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.) "As it is" is right where the gradient, or
the value, is the same on every rank. A dim is cut into equal parts in rank order; the sequence is dim -2.

What is summed or scattered in backward is under way while gradients of weights are computed: `opened` and `entered`
are two nodes, between which autograd runs what was made between them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zero3d.contracts import Axis, Pending
from zero3d.errors import DataError

SEQUENCE = -2


class Flight:
    """What a backward has started and another node of it waits for."""

    pending: Pending | None = None
    done: Any = None

    def land(self) -> Tensor:
        assert self.pending is not None
        self.pending.wait()
        value: Tensor = self.done()
        self.pending = self.done = None
        return value


def reduce(x: Tensor, axis: Axis, label: str, *, own: bool = False) -> Tensor:
    """[...] -> the sum over ranks, [...]; `own`: in place, as nobody else has `x`."""
    return _Reduce.apply(x, axis, label, own)  # type: ignore[no-untyped-call, no-any-return]


def gather(x: Tensor, axis: Axis, dim: int, label: str) -> Tensor:
    """My part along `dim` -> the whole, whose gradient is the same on every rank."""
    return _Gather.apply(x, axis, dim, label)  # type: ignore[no-untyped-call, no-any-return]


def split(x: Tensor, axis: Axis, dim: int, label: str) -> Tensor:
    """The whole, the same on every rank -> my part along `dim`. Raises `DataError` where it does not divide."""
    return _Split.apply(x, axis, dim, label)  # type: ignore[no-untyped-call, no-any-return]


def reduce_scattered(x: Tensor, axis: Axis, label: str) -> Tensor:
    """[..., T, C] -> my part of the sum over ranks, [..., T / t, C]. Raises `DataError` where T does not divide."""
    return _ReduceScattered.apply(x, axis, label)  # type: ignore[no-untyped-call, no-any-return]


def opened(x: Tensor, flight: Flight) -> Tensor:
    """`x`, whose gradient is what `flight` brings: to be made before what shall run in the meantime."""
    return _Opened.apply(x, flight)  # type: ignore[no-untyped-call, no-any-return]


def entered(x: Tensor, axis: Axis, flight: Flight, label: str, *, own: bool = False) -> Tensor:
    """`x`, the gradient of which is summed over ranks, by `flight`; `own`: in place, as nobody else has it."""
    return _Entered.apply(x, axis, flight, label, own)  # type: ignore[no-untyped-call, no-any-return]


def gathered_summed(x: Tensor, axis: Axis, flight: Flight, label: str) -> Tensor:
    """My part of the sequence -> the whole; of its gradients' sum over ranks `flight` brings my part."""
    return _GatherSummed.apply(x, axis, flight, label)  # type: ignore[no-untyped-call, no-any-return]


def start_gather(x: Tensor, axis: Axis, dim: int, label: str) -> Flight:
    """Without autograd: parts along `dim` side by side, on their way."""
    flight, parts = Flight(), x.new_empty(axis.size * x.numel())
    flight.pending = axis.all_gather(parts, x.contiguous().view(-1), label)
    flight.done = lambda: _side_by_side(parts, x.shape, axis.size, dim)
    return flight


def start_reduce_scatter(x: Tensor, axis: Axis, label: str) -> Flight:
    """Without autograd: my part, along the sequence, of the sum over ranks, on its way."""
    parts = _parts(x, axis.size, SEQUENCE, label)
    flight, out = Flight(), parts.new_empty(parts.shape[1:])
    flight.pending = axis.reduce_scatter(out.view(-1), parts.view(-1), label)
    flight.done = lambda: out
    return flight


def start_reduce(x: Tensor, axis: Axis, label: str, *, own: bool = False) -> Flight:
    """Without autograd: the sum over ranks, on its way; in place where `x` is the caller's `own`."""
    flight, out = Flight(), x if own and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    flight.pending = axis.all_reduce(out.view(-1), label)
    flight.done = lambda: out
    return flight


def _parts(x: Tensor, ranks: int, dim: int, label: str) -> Tensor:
    """[ranks, *part], contiguous."""
    if x.size(dim) % ranks:
        what = "sequence" if dim == SEQUENCE else "dim"
        raise DataError(
            f"{label}: a {what} of {x.size(dim)} does not divide over {ranks} tensor-parallel ranks",
            hint=f"Pad batches to a multiple of {ranks}, or set parallel.sequence_parallel = false."
            if dim == SEQUENCE
            else f"Use sizes that {ranks} divides, or set parallel.tp to a number that divides this one.",
        )
    dim %= x.dim()
    cut = x.unflatten(dim, (ranks, -1))
    parts: Tensor = cut.movedim(dim, 0).contiguous()
    return parts


def _side_by_side(parts: Tensor, shape: torch.Size, ranks: int, dim: int) -> Tensor:
    """The inverse of `_parts`, for parts of `shape`."""
    dim %= len(shape)
    return parts.view(ranks, *shape).movedim(0, dim).flatten(dim, dim + 1)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, label: str, own: bool) -> Tensor:
        total = start_reduce(x, axis, label, own=own).land()
        if total is x:
            ctx.mark_dirty(x)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return outer[0], None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, label: str) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_gather(x, axis, dim, label).land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return outer[0].chunk(ctx.axis.size, ctx.dim)[ctx.axis.index], None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, label: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.label = axis, dim, label
        if x.size(dim) % axis.size:
            _parts(x, axis.size, dim, label)  # says so
        return x.chunk(axis.size, dim)[axis.index].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return start_gather(outer[0], ctx.axis, ctx.dim, ctx.label).land(), None, None, None


class _ReduceScattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        return start_reduce_scatter(x, axis, label).land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return start_gather(outer[0], ctx.axis, SEQUENCE, ctx.label).land(), None, None


class _Opened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return ctx.flight.land(), None


class _Entered(torch.autograd.Function):
    """The gradient that this gives back is only a promise: `_Opened` puts the sum in its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, flight: Flight, label: str, own: bool) -> Tensor:
        ctx.axis, ctx.flight, ctx.label, ctx.own = axis, flight, label, own
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        started = start_reduce(outer[0], ctx.axis, ctx.label, own=ctx.own)
        ctx.flight.pending, ctx.flight.done = started.pending, started.done
        return outer[0], None, None, None, None


class _GatherSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, flight: Flight, label: str) -> Tensor:
        ctx.axis, ctx.flight, ctx.label, ctx.shape = axis, flight, label, x.shape
        return start_gather(x, axis, SEQUENCE, label).land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> Any:
        started = start_reduce_scatter(outer[0], ctx.axis, ctx.label)
        ctx.flight.pending, ctx.flight.done = started.pending, started.done
        return outer[0].new_empty(1).expand(ctx.shape), None, None, None
