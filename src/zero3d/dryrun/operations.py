"""Writes down what operations compute, read, write, keep and send, by the part of the model that they are of.

In forward a part is told by `enter`. A backward's operation belongs where its node was made: nodes have rising numbers.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from zero3d.contracts import Pending, Watched
from zero3d.dryrun.fakes import DEVICE
from zero3d.planner.workload import FUSED_BACKWARD, FUSED_FORWARD
from zero3d.trees import tensors_in
from zero3d.unwatched import Unwatched

FREE = frozenset(
    {"detach", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view"}
    | {"_local_scalar_dense"}
)
"""Operations that touch no elements, beside views."""
OPERANDS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_grouped_mm": (0, 1)}
"""Products -> which arguments are the matrices. In a grouped one each row is multiplied with one of the matrices."""


@dataclass
class Dims:
    """One product [m, k] x [k, n], `times` over."""

    m: int
    n: int
    k: int
    times: int = 1


@dataclass
class Sent:
    """One call over tp. behind: FLOPs of products between its start and the wait for it."""

    verb: str
    num_bytes: int
    behind: int = 0


@dataclass
class PassTally:
    """See `workload.Pass`; of one run."""

    products: list[Dims] = field(default_factory=list)
    attention: list[Dims] = field(default_factory=list)
    fused: float = 0.0
    fused_done: float = 0.0
    attention_moved: int = 0
    moved: int = 0
    launches: int = 0
    calls: list[Sent] = field(default_factory=list)


@dataclass
class PartTally:
    """See `workload.Part`; of one run. uses: parameter -> whether it is computed with, not looked up alone; inputs:
    storages that gradients of weights were made of."""

    forward: PassTally = field(default_factory=PassTally)
    backward: PassTally = field(default_factory=PassTally)
    weights: list[Dims] = field(default_factory=list)
    for_weights: int = 0
    inputs: set[int] = field(default_factory=set)
    saved: int = 0
    attention_saved: int = 0
    entering: int = 0
    entering_saved: int = 0
    leaving: int = 0
    uses: dict[str, bool] = field(default_factory=dict)


class Operations(TorchDispatchMode):
    """Of one forward and backward of a model with `parameters`, under way while it is entered."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], buffers: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: list[PartTally] = [PartTally()]
        self._at = 0
        self._entering: set[int] = set()
        self._starts = [0]
        self._starting = [0]
        self._backward = False
        self._computed = 0
        self._names = {_storage(one): name for name, one in parameters.items()}
        self._kept = {_storage(one): one for one in buffers}
        self._shapes = {tuple(one.shape) for one in parameters.values()}
        self._scores: set[tuple[int, int, int]] = set()

    def enter(self, part: int) -> PartTally:
        """What comes now is of this part."""
        while len(self.parts) <= part:
            self.parts.append(PartTally())
        self._at = part
        self._starts.append(_get_sequence_nr())
        self._starting.append(part)
        return self.parts[part]

    def enter_with(self, part: int, given: Sequence[Tensor]) -> None:
        """What comes now is of this part, which is given these."""
        tally = self.enter(part)
        self._entering = {_storage(one) for one in given}
        tally.entering += sum(one.nbytes for one in given)

    def enter_backward(self) -> None:
        self._backward = True

    def keep(self, tensor: Tensor) -> Tensor:
        """A hook of saved tensors."""
        key = _storage(tensor)
        if key not in self._kept and key not in self._names:
            self._kept[key] = tensor
            part, num_bytes = self.parts[self._at], tensor.untyped_storage().nbytes()
            part.saved += num_bytes
            if key in self._entering:
                part.entering_saved += num_bytes
            if self._is_score(tensor):
                part.attention_saved += num_bytes
        return tensor

    def call(self, verb: str, num_bytes: int) -> Callable[[], None]:
        """A call over tp starts. -> what is to be called when it is waited for."""
        part, sent, before = self._part(), Sent(verb, num_bytes), self._computed
        (part.backward if self._backward else part.forward).calls.append(sent)

        def waited() -> None:
            sent.behind = self._computed - before

        return waited

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # Asked for at every turn, and known.
            return getattr(args[0], "fake_device", None) or func(*args)
        out = func(*args, **(kwargs or {}))
        name = _name(func)
        if name is not None:
            self._note(name, args, list(tensors_in([args, list((kwargs or {}).values())])), out)
        return out

    def _part(self) -> PartTally:
        """Of the operation that runs."""
        node = torch._C._current_autograd_node() if self._backward else None
        if node is None:
            return self.parts[self._at]
        return self.parts[self._starting[bisect_right(self._starts, node._sequence_nr()) - 1]]

    def _note(self, name: str, args: Any, inputs: list[Tensor], out: Any) -> None:
        part, outputs = self._part(), list(tensors_in(out))
        tally = part.backward if self._backward else part.forward
        if not self._backward:
            for one in filter(None, (self._names.get(_storage(tensor)) for tensor in inputs)):
                part.uses[one] = part.uses.get(one, False) or name != "embedding"
        tally.launches += 1
        touched = sum(map(_bytes, (*inputs, *outputs)))
        if name in OPERANDS:
            self._product(name, args, outputs[0], part, tally)
        elif "scaled_dot_product" in name:
            self._fused(args, tally)
            tally.moved += touched
        elif name in ("convolution", "convolution_backward"):
            self._convolution(args, outputs, part, tally)
        elif name == "embedding":
            tally.moved += 2 * _bytes(outputs[0]) + _bytes(inputs[-1])
        elif any(map(self._is_score, (*inputs, *outputs))):
            tally.attention_moved += touched
        else:
            tally.moved += touched

    def _product(self, name: str, args: Any, out: Tensor, part: PartTally, tally: PassTally) -> None:
        a, b = (args[at] for at in OPERANDS[name])
        dims = Dims(m=a.size(-2), n=b.size(-1), k=a.size(-1), times=a.size(0) if a.dim() == 3 else 1)
        self._computed += 2 * dims.m * dims.n * dims.k * dims.times
        if _storage(a) in self._names or _storage(b) in self._names:
            tally.products.append(dims)
        elif self._backward and (a.dim() == 2 or tuple(out.shape) in self._shapes):
            part.weights.append(dims)
            self._wait(part, a, b)
        elif a.dim() == 2:
            tally.products.append(dims)
        else:
            tally.attention.append(dims)
            if not self._backward and not any(map(self._is_score, (a, b))):
                self._scores.add((out.size(-2), out.size(-1), out.numel()))

    def _fused(self, args: Any, tally: PassTally) -> None:
        """Arguments are (the gradient,) q, k, v, ..., is_causal, ..."""
        q, k = (args[1], args[2]) if self._backward else (args[0], args[1])
        batch, heads, rows, width = q.shape
        matrix = batch * heads * rows * k.size(-2) * width
        seen = 0.5 if rows == k.size(-2) and any(one is True for one in args) else 1.0
        # As papers count, a backward is two forwards.
        tally.fused += (2 if self._backward else 1) * FUSED_FORWARD * matrix
        tally.fused_done += seen * (FUSED_BACKWARD if self._backward else FUSED_FORWARD) * matrix

    def _convolution(self, args: Any, outputs: list[Tensor], part: PartTally, tally: PassTally) -> None:
        y, weight = (args[0], args[2]) if self._backward else (outputs[0], args[1])
        dims = Dims(m=y.numel() // y.size(1), n=weight.size(0), k=prod(weight.shape[1:]))
        tally.products.append(dims)
        if self._backward:
            part.weights.append(dims)
            self._wait(part, args[0], args[1])

    def _wait(self, part: PartTally, *operands: Tensor) -> None:
        """What a gradient of weights is made of. Some have one input together, which is among what is kept."""
        for one in operands:
            key = _storage(one)
            if key not in part.inputs:
                part.for_weights += one.numel() * one.element_size()
            if key in self._kept:
                part.inputs.add(key)

    def _is_score(self, tensor: Tensor) -> bool:
        return tensor.dim() >= 2 and (tensor.size(-2), tensor.size(-1), tensor.numel()) in self._scores


class Listener(Unwatched):
    """The `Watcher` of an axis that tells `operations` its calls."""

    operations: Operations | None = None

    def calling(self, axis: str, verb: str, label: str, nbytes: int) -> Watched:
        if self.operations is None:
            return super().calling(axis, verb, label, nbytes)
        waited = self.operations.call(verb, nbytes)
        return lambda pending: Awaited(pending, waited)


class Awaited:
    """Something under way of which it is told when it is waited for."""

    def __init__(self, pending: Pending, waited: Callable[[], None]) -> None:
        self._pending = pending
        self._waited = waited

    def wait(self) -> None:
        self._waited()
        self._pending.wait()


@cache
def _name(func: Any) -> str | None:
    """Of an operation that takes time."""
    namespace, _, name = func.name().partition("::")
    name = name.partition(".")[0]
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return None if namespace == "prim" or name in FREE or is_view else name


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _bytes(tensor: Tensor) -> int:
    """What reading it takes: an expanded dim is read once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride()) if stride or not size)
    return prod(sizes) * tensor.element_size()
