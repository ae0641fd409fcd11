"""What a part of a model has in memory while it runs: what its forward and backward make, and when it goes.

The model runs on tensors without data, at one and at two samples. What both do one after the other is taken to grow
evenly with the samples.
"""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from zero3d.dryrun.fakes import DEVICE
from zero3d.planner.workload import Amount, Course, Rise
from zero3d.trees import tensors_in

LAST = 1 << 62


@dataclass(slots=True)
class Change:
    """Of what is held, by so many bytes; or, with none, the arrival of the gradient of a parameter."""

    part: int
    backward: bool
    storage: int
    nbytes: int = 0
    gradient: str = ""


@dataclass
class Levels(TorchDispatchMode):
    """Under way round one forward and backward. lasting: storages of these tensors do not count."""

    parameters: Mapping[str, nn.Parameter]
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at, self._backward = 0, False
        self._starts, self._starting = [0], [0]
        self._known: dict[int, tuple[Any, int]] = {}
        self._number = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def enter(self, part: int) -> None:
        """What comes now is of this part."""
        self._at = part
        self._starts.append(_get_sequence_nr())
        self._starting.append(part)

    def enter_backward(self) -> None:
        self._backward = True

    def number_of(self, tensor: Tensor) -> int:
        """Of its storage, as `Change.storage` has it; -1 for one from before."""
        return self._known.get(tensor.untyped_storage()._cdata, (None, -1))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # Asked for at every turn, and known.
            return getattr(args[0], "fake_device", None) or func(*args)
        node: Any = torch._C._current_autograd_node() if self._backward else None
        if node is not None and (number := node._sequence_nr()) < LAST:  # Those that add up gradients have no place.
            self._at = self._starting[bisect_right(self._starts, number) - 1]
        out = func(*args, **(kwargs or {}))
        for leaf in tensors_in(out):
            storage: Any = leaf.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                given = {one.untyped_storage()._cdata for one in tensors_in([args, list((kwargs or {}).values())])}
                self._see(key, storage, 0 if key in given else storage.nbytes())
        return out

    def _see(self, key: int, storage: Any, nbytes: int) -> None:
        self._number += 1
        self._known[key] = weakref.ref(storage, partial(self._gone, key, self._number, nbytes)), self._number
        self._change(self._number, nbytes)

    def _gone(self, key: int, number: int, nbytes: int, _: object) -> None:
        self._known.pop(key)
        self._change(number, -nbytes)

    def _change(self, number: int, nbytes: int) -> None:
        if nbytes:
            self.changes.append(Change(self._at, self._backward, number, nbytes))

    def _arrived(self, name: str, parameter: Tensor) -> None:
        self.changes.append(Change(self._at, self._backward, 0, gradient=name))
        parameter.grad = None


def run(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    loss: Callable[[], Tensor],
    enter_block: Callable[[nn.Module, Any, Any], Any],
    held: Callable[[], Iterable[Tensor]],
) -> list[Change]:
    """Of a forward and a backward of `loss`, which runs `model`: part 0 is before the `blocks`. held: what lives over
    steps. What is computed between one block and the next is the former's, so the last one's part lasts up to the next
    module."""
    levels = Levels(dict(model.named_parameters()))
    over = False

    def entered(part: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        levels.enter(part)
        return enter_block(block, args, kwargs)

    def left(part: int, *_: Any) -> None:
        nonlocal over
        over = part == len(blocks)

    def other(*_: Any) -> None:
        nonlocal over
        if over:
            levels.enter(len(blocks) + 1)
        over = False

    hooks = [
        hook
        for at, block in enumerate(blocks)
        for hook in (
            block.register_forward_pre_hook(partial(entered, at + 1), with_kwargs=True),
            block.register_forward_hook(partial(left, at + 1)),
        )
    ]
    inside = {id(module) for block in blocks for module in block.modules()}
    hooks += [one.register_forward_pre_hook(other) for one in model.modules() if id(one) not in inside]
    hooks.append(model.register_forward_hook(other))
    try:
        with levels:
            total = loss()
            levels.enter_backward()
            total.backward()
        lasting = {levels.number_of(one) for one in held()}
    finally:
        levels.close()
        for hook in hooks:
            hook.remove()
    return [change for change in levels.changes if change.storage not in lasting]


def courses(one: Sequence[Change], two: Sequence[Change], parts: int, samples: int) -> list[tuple[Course, Course]]:
    """(forward, backward) of each part, from the changes at so many `samples` and at one more (or of the same)."""
    found = []
    for part in range(parts):
        pair = []
        for backward in (False, True):
            mine = [[c for c in changes if c.part == part and c.backward == backward] for changes in (one, two)]
            pair.append(_course(_rises(mine[0]), _rises(mine[1]), samples))
        found.append((pair[0], pair[1]))
    return found


@dataclass
class _Segment:
    """Up to the arrival of a gradient: the levels before each fall, from the start of the pass; and the last."""

    tops: list[int]
    end: int
    gradient: str


def _rises(changes: Sequence[Change]) -> list[_Segment]:
    found, tops, level, rising = [], [0], 0, False
    for change in changes:
        if change.gradient:
            found.append(_Segment([*tops, level], level, change.gradient))
            tops, rising = [level], False
        elif change.nbytes < 0:
            if rising:
                tops.append(level)
            level, rising = level + change.nbytes, False
        else:
            level, rising = level + change.nbytes, True
    return [*found, _Segment([*tops, level], level, "")]


def _course(one: Sequence[_Segment], two: Sequence[_Segment], samples: int) -> Course:
    if [segment.gradient for segment in one] != [segment.gradient for segment in two]:
        two = one  # What it does hangs on the number of samples.
    rises = []
    for a, b in zip(one, two):
        tops = zip(a.tops, b.tops) if len(a.tops) == len(b.tops) else [(max(a.tops), max(b.tops))]
        rises.append(Rise(_highest(tops, samples), a.gradient))
    return Course(tuple(rises), _line(one[-1].end, two[-1].end, samples))


def _highest(pairs: Iterable[tuple[int, int]], samples: int) -> tuple[Amount, ...]:
    """Those that are the highest of all at some number of samples from `samples` on."""
    found: list[tuple[int, int]] = []
    for top in sorted(set(pairs), key=lambda pair: (-pair[0], pair[0] - pair[1])):
        if all(top[1] - top[0] > other[1] - other[0] for other in found):
            found.append(top)
    return tuple(_line(*top, samples) for top in found)


def _line(one: int, two: int, samples: int) -> Amount:
    return Amount(float(two - one), float(one - samples * (two - one)))
