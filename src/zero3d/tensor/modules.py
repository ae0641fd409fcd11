"""What takes the place of a linear layer, and hooks for what does not need that.

While whole weights are there (`Cuts.active` is off) modules compute what they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from zero3d.contracts import Axis
from zero3d.tensor.linear import Column, Door, Entry
from zero3d.tensor.loss import SplitLogits
from zero3d.tensor.regions import SEQUENCE, Flight, entered, gather, opened, reduce, reduce_scattered, split


class Streams(Protocol):
    """Where dropout draws from: another stream on every rank where activations are cut, one where they are whole."""

    def enter_cut(self) -> None: ...
    def leave_cut(self) -> None: ...


class Cuts(Protocol):
    """What all parts of a cut model share."""

    axis: Axis
    streams: Streams
    active: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnPart:
    """A linear layer of which this rank has some of the outputs.

    siblings: columns of the same module; gathers: its input is a part of the sequence;
    enters: its input is whole (or a part of the sequence), not cut already; output: what becomes of its outputs, "cut",
    "logits" or "whole"; extent: of all ranks' outputs, without padding
    """

    cuts: Cuts
    label: str
    column: Column
    siblings: Sequence[Column]
    door: Door
    gathers: bool
    enters: bool
    output: str
    extent: int

    def __call__(self, x: Tensor) -> Any:
        axis, bias = self.cuts.axis, self.column.module.bias
        assert bias is None or isinstance(bias, Tensor)
        if self.enters:
            entry = self.door.open(x, self._entry(x))
            y = entry.column(entry.inside, self.column, bias)
        else:
            found = self.door.find(x)
            y = found.column(x, self.column, bias) if found else F.linear(x, self.column.weight, bias)
        if self.output == "cut":
            self.cuts.streams.enter_cut()
            return y
        self.door.shut()
        if self.output == "logits":
            return SplitLogits(local=y, vocabulary=self.extent, axis=axis)
        return gather(y, axis, -1, f"{self.label} outputs")[..., : self.extent]

    def _entry(self, x: Tensor) -> Callable[[], Entry]:
        return lambda: Entry(x, self.cuts.axis, self.siblings, self.label, gathers=self.gathers)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPart:
    """A linear layer of which this rank has some of the inputs. `scatters`: its output is a part of the sequence."""

    cuts: Cuts
    label: str
    column: Column
    door: Door
    splits: bool
    scatters: bool

    def __call__(self, x: Tensor) -> Tensor:
        axis, bias = self.cuts.axis, self.column.module.bias
        assert bias is None or isinstance(bias, Tensor)
        self.door.shut()
        if self.splits:
            x = split(x, axis, -1, f"{self.label} inputs")
        y = self.column.linear(x)
        y = reduce_scattered(y, axis, self.label) if self.scatters else reduce(y, axis, self.label, own=True)
        self.cuts.streams.leave_cut()
        return y if bias is None else y + bias


class StandIn(nn.Module):
    """See above; `_part` computes in place of the module."""

    _part: ColumnPart | RowPart

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._part.cuts.active:
            return super().forward(*args, **kwargs)
        return self._part(*args, *kwargs.values())


class EmbeddingPart:
    """Hooks of an embedding of which this rank has rows `first` and on: what others have is zero here."""

    def __init__(self, cuts: Cuts, label: str, first: int, rows: int, vocabulary: int) -> None:
        self._cuts = cuts
        self._label = label
        self._first = first
        self._rows = rows
        self._vocabulary = vocabulary
        self._elsewhere: list[Tensor] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._cuts.active:
            return None
        ids: Tensor = (*args, *kwargs.values())[0]
        if not ids.is_cuda and bool(((ids < 0) | (ids >= self._vocabulary)).any()):
            raise IndexError(f"{self._label}: an id is outside of 0 to {self._vocabulary - 1}")
        ids = ids - self._first
        elsewhere = (ids < 0) | (ids >= self._rows)
        self._elsewhere.append(elsewhere)
        return (ids.masked_fill(elsewhere, 0),), {}

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not self._cuts.active:
            return None
        mine = output.masked_fill(self._elsewhere.pop().unsqueeze(-1), 0)
        return reduce(mine, self._cuts.axis, self._label, own=True)


class RegionPart:
    """Hooks of a module round which the sequence is whole, or its experts' inputs enter."""

    def __init__(self, cuts: Cuts, label: str, module: nn.Module) -> None:
        self._cuts = cuts
        self._label = label
        parts = [child._part for child in module.children() if isinstance(child, StandIn)]
        self._columns = [part.column for part in parts if isinstance(part, ColumnPart)]
        self._doors = [part.door for part in parts]

    def gather_summed(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What is computed from the whole sequence inside is cut."""

        def enter(x: Tensor) -> Tensor:
            entry = Entry(x, self._cuts.axis, self._columns, self._label, gathers=True, own=False)
            for door in self._doors:
                door.open(entry.inside, lambda: entry)
            return entry.inside

        return self._change_first(enter, args, kwargs)

    def gather(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._change_first(lambda x: gather(x, self._cuts.axis, SEQUENCE, self._label), args, kwargs)

    def split(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._change_first(lambda x: split(x, self._cuts.axis, SEQUENCE, self._label), args, kwargs)

    def enter_all(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """All inputs that have a gradient are whole, and what is computed from them is a part of a sum."""

        def enter(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.requires_grad):
                return x
            flight = Flight()
            return entered(opened(x, flight), self._cuts.axis, flight, self._label)

        if not self._cuts.active:
            return None
        return tuple(enter(one) for one in args), {key: enter(one) for key, one in kwargs.items()}

    def reduce_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._change_output(lambda x: reduce(x, self._cuts.axis, self._label), output)

    def gather_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._change_output(lambda x: gather(x, self._cuts.axis, SEQUENCE, self._label), output)

    def split_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._change_output(lambda x: split(x, self._cuts.axis, SEQUENCE, self._label), output)

    def _change_first(self, change: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> Any:
        """The first floating-point tensor among the inputs."""
        if not self._cuts.active:
            return None
        for index, one in enumerate(args):
            if isinstance(one, Tensor) and one.is_floating_point():
                return (*args[:index], change(one), *args[index + 1 :]), kwargs
        for key, one in kwargs.items():
            if isinstance(one, Tensor) and one.is_floating_point():
                return args, {**kwargs, key: change(one)}
        return None

    def _change_output(self, change: Callable[[Tensor], Tensor], output: Any) -> Any:
        """The first tensor of it."""
        if not self._cuts.active:
            return None
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)
