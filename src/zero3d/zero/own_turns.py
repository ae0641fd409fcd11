"""Turns that nobody announces: from the first gradient of a backward that the user calls to its end.

A sum of gradients goes over one or more turns. It ends with a step, or when the user sets the slices' gradients to
None (`optimizer.zero_grad()`); the next backward then begins a new one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zero3d.errors import UsageError
from zero3d.params import ParamInfo
from zero3d.recompute import in_backward, untraced
from zero3d.trees import needing_grad, tensors_in
from zero3d.zero.replica import ZeroReplica


class OwnTurns:
    """Tells `replica` when backwards begin and end, and gives `pieces`, the slices by name, their gradients.

    began: called when the user's backward begins
    changed: called when the sum is about to become another, with whether it begins anew
    """

    def __init__(
        self,
        model: nn.Module,
        infos: Sequence[ParamInfo],
        replica: ZeroReplica,
        pieces: Mapping[str, nn.Parameter],
        *,
        began: Callable[[], None],
        changed: Callable[[bool], None],
    ) -> None:
        self._began = began
        self._infos = infos
        self._parameters = [model.get_parameter(info.name) for info in infos]
        self._replica = replica
        self._pieces = pieces
        self._changed = changed
        self._running = False
        self._broken = False
        # Sums are not averages yet. What reads them before a step, a clipping or an optimizer that nobody told of,
        # shall see that there is nothing to read: a number in the shape of each slice, which `zero_grad` clears.
        self._numbers = torch.ones(len(pieces), device=replica.device)
        self._marks = [number.expand(piece.shape) for number, piece in zip(self._numbers, pieces.values())]
        self._filled = {name for name, piece in pieces.items() if piece.numel()}
        self._gradients = {
            piece.name: shard.gradient[piece.start : piece.stop]
            for shard in replica.shards
            for piece in shard.pieces
            if piece.name
        }
        self._graph = False
        self._ended = True
        self._reduced = True
        self._accumulating = False
        # The backward of what the whole model gave begins here, before any gradient of a parameter is there.
        self._hooks = [
            model.register_forward_pre_hook(untraced(model)(self._refuse_unfrozen)),
            model.register_forward_hook(untraced(model)(self._watch)),
        ]
        replica.ask_before_gradients(self._begin)

    @contextmanager
    def accumulate(self, on: bool) -> Iterator[None]:
        """A backward inside is not the last of its sum."""
        before, self._accumulating = self._accumulating, on
        try:
            yield
        finally:
            self._accumulating = before

    def settle(self) -> Collection[str]:
        """The sum is whole: what this rank has not reduced yet, or not computed at all, is reduced now. -> the
        parameters that have none, as it was thrown away."""
        self._refuse_broken()
        thrown_away = self.thrown_away
        if self._ended or thrown_away or not self._reduced:
            self._open(last=True)
            self._close()
        self._replica.finish()
        return thrown_away

    @property
    def thrown_away(self) -> Collection[str]:
        """Parameters whose sums the user has cleared since the last backward: all, or those set to None. (Where some
        are set to zeros, ranks without elements of them do not see it.)"""
        cleared = self._cleared_names()
        return cleared if len(cleared) == len(self._pieces) else self._nones()

    @property
    def idle(self) -> bool:
        """Nothing has been summed since a step or zero_grad."""
        return self._ended or self._cleared

    def end_sum(self) -> None:
        """The next backward begins a new one."""
        self._ended = True

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _refuse_unfrozen(self, *_: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # past the guards of released ones
            changed = [
                info.name
                for info, parameter in zip(self._infos, self._parameters)
                if parameter.requires_grad != info.trainable
            ]
        if changed:
            raise UsageError(
                f"requires_grad of {changed[0]} changed, and its gradient would not be shared among ranks",
                hint="Change it inside sharded.edit(lambda model: ...), on every rank.",
            )

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        if not in_backward():
            self._notice_error()
            for tensor in needing_grad(tensors_in(output)):
                tensor.register_hook(self._begin)

    def _notice_error(self) -> None:
        """A backward that still runs outside of any ended with an error."""
        if self._running:
            self._running, self._broken = False, True
            self._replica.give_up_turn()

    def _refuse_broken(self) -> None:
        self._notice_error()
        if self._broken and not self._cleared and not self._ended:
            raise UsageError(
                "the backward before ended with an error, and left a part of the gradients",
                hint="Call optimizer.zero_grad() before going on.",
            )
        self._broken = False

    def _begin(self, *_: Any) -> None:
        if not self._running:
            self._refuse_broken()
            self._began()
            self._open(last=not self._accumulating)
            torch.autograd.Variable._execution_engine.queue_callback(self._close)

    def _open(self, last: bool) -> None:
        cleared = self._cleared_names()
        first = self._ended or len(cleared) == len(self._pieces)
        self._changed(first)
        if cleared and not first:
            self._replica.finish(keep=True)  # What is under way would land on what is forgotten.
            self._replica.forget(cleared)
        self._replica.begin_turn(first, last)
        self._running, self._ended, self._reduced = True, False, last
        self._graph = torch.is_grad_enabled() and in_backward()  # of the gradients, which may be differentiated too

    def _close(self) -> None:
        self._running = False
        self._replica.end_turn(keep=self._graph)
        if self._reduced:
            for shard in self._replica.finish(keep=self._graph):
                shard.coming.wait()
        self._numbers.fill_(float("nan"))
        for piece, mark in zip(self._pieces.values(), self._marks):
            piece.grad = mark

    def hand_over(self) -> None:
        """The slices' gradients are what is in the shards."""
        for name, gradient in self._gradients.items():
            self._pieces[name].grad = gradient

    @property
    def _cleared(self) -> bool:
        return len(self._cleared_names()) == len(self._pieces)

    def _cleared_names(self) -> set[str]:
        """Parameters whose sums the user has cleared, by None or by zero."""
        none = self._nones()
        zero = {name for name, number in zip(self._pieces, self._numbers.tolist()) if number == 0}
        # Of an empty slice nothing shows; it is cleared if all that can show it are.
        return none | (set(self._pieces) if self._filled and zero >= self._filled else zero)

    def _nones(self) -> set[str]:
        return {name for name, piece in self._pieces.items() if piece.grad is None}
