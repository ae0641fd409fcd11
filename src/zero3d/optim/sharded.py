"""Torch optimizers on shards: each shard has its own, over the pieces of parameters that lie in it; parameters that are
updated whole have one each.

Pieces start and end at multiples of 64 elements, so an elementwise update gives the same bits wherever shards are
cut. A parameter that no backward reached has no gradient, as in plain torch: its state and weight stay.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero3d.comm.bucket import Piece
from zero3d.contracts import Axis
from zero3d.optim.assignment import Assignment
from zero3d.optim.inner import Inner
from zero3d.optim.rule import Rule
from zero3d.optim.whole import WholeParameters
from zero3d.zero.shard import Shard


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of one shard that one optimizer updates. `scales`: it scales their gradients as it reads them."""

    pieces: Sequence[Piece]
    inner: Inner
    scales: bool


class ShardedOptimizer:
    """The `Optimizer` whose state lives beside the master weights."""

    def __init__(self, assignment: Assignment, shards: Sequence[Shard], axis: Axis) -> None:
        self._flat = {shard: list(_pieces(assignment, shard)) for shard in shards}
        self._whole = WholeParameters(assignment, shards, axis)
        self._ahead = axis.size
        self._scratch = torch.empty(0)
        self._unused: frozenset[str] = frozenset()
        self._peak = self.learning_rate = assignment.learning_rate

    def leave(self, unused: frozenset[str]) -> None:
        """The next step has no gradient for these parameters."""
        self._unused = unused

    def step(self, shards: Iterable[Shard], lr: float, scale: float) -> Iterable[Shard]:
        """`lr` is a factor of each group's own learning rate.

        Shards with parameters that are updated whole come back later, on every rank alike: their weights may be on
        their way over as many further shards as there are ranks, so that the owners of several work at the same time.
        """
        self.learning_rate = self._peak * lr
        begun: deque[Shard] = deque()
        waiting: deque[Shard] = deque()
        for shard in shards:
            self._begin(shard, lr, scale)
            if not self._whole.of(shard):
                yield shard
                continue
            begun.append(shard)
            if len(begun) > 1:
                waiting.append(self._update_whole(begun.popleft(), lr, scale))
            if len(waiting) > self._ahead:
                yield self._finished(waiting.popleft())
        waiting.extend(self._update_whole(shard, lr, scale) for shard in begun)
        for shard in waiting:
            yield self._finished(shard)

    def state_of(self, shard: Shard) -> Mapping[str, Mapping[str, Tensor]]:
        """Of the pieces; parameters that are updated whole are in `whole_state`."""
        return {
            piece.name: state for flat in self._flat[shard] for piece, state in zip(flat.pieces, flat.inner.state())
        }

    def whole_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """State of the parameters that this rank owns whole, by name, in whatever shapes their optimizer keeps."""
        return self._whole.state()

    def set_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Whole optimizer states by parameter name, the same on every rank, become those of the pieces. State of
        elements is flat, or of its own shape for a parameter that is updated whole; the rest are numbers."""
        for pieces in self._flat.values():
            for flat in pieces:
                for index, piece in enumerate(flat.pieces):
                    if piece.name in states:
                        cut = {key: _cut(value, piece) for key, value in states[piece.name].items()}
                        flat.inner.set_state(index, cut)
        self._whole.set_states(states)

    def fetch(self) -> None:
        """Master weights were written to: copies of them follow. Collective."""
        self._whole.fetch()

    def held(self) -> Iterable[tuple[str, Tensor]]:
        yield "buffers", self._scratch
        for pieces in self._flat.values():
            for flat in pieces:
                yield from flat.inner.held()
        yield from self._whole.held()

    def _begin(self, shard: Shard, lr: float, scale: float) -> None:
        """The gradient is scaled and on its way to where it is wanted whole; all pieces are updated."""
        shard.coming.wait()
        gradient = self._scaled(shard, scale)
        self._whole.send_gradients(shard, self._unused)
        for flat in self._flat[shard]:
            gradients = [
                None if piece.name in self._unused else gradient[piece.start : piece.stop] for piece in flat.pieces
            ]
            flat.inner.step(gradients, lr, scale if flat.scales else None)

    def _update_whole(self, shard: Shard, lr: float, scale: float) -> Shard:
        self._whole.update(shard, lr, scale, self._unused)
        return shard

    def _finished(self, shard: Shard) -> Shard:
        self._whole.finish(shard)
        return shard

    def _scaled(self, shard: Shard, scale: float) -> Tensor:
        """The gradient in fp32 times `scale`: in place, or beside one that is held in 16 bits. What an optimizer
        `scales` by itself is left to it."""
        flats = self._flat[shard]
        if shard.gradient.dtype != shard.master.dtype:
            if not flats:
                return self._scratch
            if self._scratch.numel() < shard.gradient.numel():
                self._scratch = torch.empty_like(shard.master)
            return self._scratch[: shard.gradient.numel()].copy_(shard.gradient).mul_(scale)
        shard.scaled *= scale
        if not any(flat.scales for flat in flats):
            return shard.gradient.mul_(scale)
        for flat in flats:
            for piece in () if flat.scales else flat.pieces:
                shard.gradient[piece.start : piece.stop].mul_(scale)
        for whole in self._whole.of(shard):
            whole.of_mine(shard.gradient).mul_(scale)
        return shard.gradient


def _cut(value: Any, piece: Piece) -> Any:
    """The piece's part of a whole state, with zeros in the padding."""
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        return value.clone()
    out = value.new_zeros(piece.stop - piece.start)
    out[: piece.numel] = value.view(-1)[piece.begin : piece.begin + piece.numel]
    return out


def _pieces(assignment: Assignment, shard: Shard) -> Iterable[Pieces]:
    """The shard's pieces by rule, but those of parameters that are updated whole."""
    by_rule: dict[Rule, list[Piece]] = {}
    for piece in shard.pieces:
        # Padding without a parameter goes with the bucket's last one.
        name = piece.name or shard.bucket.slots[-1].name
        if name not in assignment.whole:
            by_rule.setdefault(assignment.rule_of[name], []).append(piece)
    for rule, pieces in by_rule.items():
        inner = Inner(rule, [(piece.name, shard.master[piece.start : piece.stop]) for piece in pieces])
        yield Pieces(pieces, inner, inner.can_scale and shard.gradient.dtype == torch.float32)
