"""Torch optimizers on shards: each run of shards has its own, over the pieces of parameters that lie in it; parameters
that are updated whole have one each. A run is one shard, or small ones that follow each other.

Pieces start and end at multiples of 64 elements, so an elementwise update gives the same bits wherever shards are
cut. A parameter that no backward reached has no gradient, as in plain torch: its state and weight stay.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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

RUN = 1 << 18
"""Elements of small shards that share an optimizer, as each call of one costs as much as updating thousands of them."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a run that one optimizer updates. `scales`: it scales their gradients as it reads them."""

    pieces: Sequence[tuple[Shard, Piece]]
    inner: Inner
    scales: bool


@dataclass(frozen=True, eq=False)
class Run:
    """Shards that are updated together."""

    shards: Sequence[Shard]
    flats: Sequence[Pieces]


class ShardedOptimizer:
    """The `Optimizer` whose state lives beside the master weights."""

    def __init__(self, assignment: Assignment, shards: Sequence[Shard], axis: Axis) -> None:
        self._runs = {
            shard: run
            for together in _runs(assignment, shards)
            for run in [Run(together, list(_pieces(assignment, together)))]
            for shard in together
        }
        self._whole = WholeParameters(assignment, shards, axis)
        self._ahead = axis.size
        self._scratch = torch.empty(0)
        self._unused: frozenset[str] = frozenset()
        self._before_update: Callable[[Shard], None] = _nothing
        self._peak = self.learning_rate = assignment.learning_rate
        self._assignment = assignment

    def leave(self, unused: frozenset[str]) -> None:
        """The next step has no gradient for these parameters."""
        self._unused = unused

    def ask_before_update(self, call: Callable[[Shard], None]) -> None:
        """`call` comes before a shard's master weights and state change."""
        self._before_update = call

    def step(self, shards: Iterable[Shard], lr: float, scale: float) -> Iterable[Shard]:
        """`lr` is a factor of each group's own learning rate; `shards`: all, in their order.

        Shards with parameters that are updated whole come back later, on every rank alike: their weights may be on
        their way over as many further shards as there are ranks, so that the owners of several work at the same time.
        """
        self.learning_rate = self._peak * lr
        begun: deque[Shard] = deque()
        waiting: deque[Shard] = deque()
        for shard in shards:
            run = self._runs[shard]
            if shard is not run.shards[-1]:
                continue
            self._begin(run, lr, scale)
            if not self._whole.of(shard):
                yield from run.shards
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
            piece.name: state
            for flat in self._runs[shard].flats
            for (one, piece), state in zip(flat.pieces, flat.inner.state())
            if one is shard
        }

    def whole_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """State of the parameters that this rank owns whole, by name, in whatever shapes their optimizer keeps."""
        return self._whole.state()

    def set_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Whole optimizer states by parameter name, the same on every rank, become those of the pieces. State of
        elements is flat, or of its own shape for a parameter that is updated whole; the rest are numbers."""
        for flat in self._flats():
            for index, (_, piece) in enumerate(flat.pieces):
                if piece.name in states:
                    flat.inner.set_state(index, {key: cut(value, piece) for key, value in states[piece.name].items()})
        self._whole.set_states(states)

    def keys_of_state(self) -> Mapping[str, frozenset[str]]:
        """See `Assignment`: of all parameters, whatever this rank updates of them."""
        return self._assignment.keys_of_state()

    @property
    def updates_whole(self) -> Mapping[str, bool]:
        """The parameters of the shards that are updated whole; whether by this rank."""
        return self._whole.here

    def set_state_of(self, shard: Shard, states: Mapping[str, Mapping[str, Any]]) -> None:
        """The inverse of `state_of`: state of the shard's pieces, each as long as its piece."""
        for flat in self._runs[shard].flats:
            for index, (one, piece) in enumerate(flat.pieces):
                if one is shard and piece.name in states:
                    flat.inner.set_state(index, states[piece.name])

    def set_whole_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """The inverse of `whole_state`, for all that this rank `updates_whole`."""
        self._whole.set_states(states)

    def flush(self) -> Iterable[Shard]:
        """Shards whose update was made, and whose weights were to follow later."""
        return ()

    def go_on_from(self, updates: int) -> None:
        """So many updates were made already."""

    def fetch(self) -> None:
        """Master weights were written to: copies of them follow. Collective."""
        self._whole.fetch()

    def held(self) -> Iterable[tuple[str, Tensor]]:
        yield "buffers", self._scratch
        for flat in self._flats():
            yield from flat.inner.held()
        yield from self._whole.held()

    def _flats(self) -> Iterable[Pieces]:
        return (flat for run in dict.fromkeys(self._runs.values()) for flat in run.flats)

    def _begin(self, run: Run, lr: float, scale: float) -> None:
        """Gradients are scaled and on their way to where they are wanted whole; all pieces are updated."""
        scaled = {}
        for shard in run.shards:
            self._before_update(shard)
            shard.coming.wait()
            scaled[shard] = self._scaled(shard, scale)
            self._whole.send_gradients(shard, self._unused)
        for flat in run.flats:
            gradients = [
                None if piece.name in self._unused else scaled[shard][piece.start : piece.stop]
                for shard, piece in flat.pieces
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
        flats = self._runs[shard].flats
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
            for one, piece in () if flat.scales else flat.pieces:
                if one is shard:
                    shard.gradient[piece.start : piece.stop].mul_(scale)
        for whole in self._whole.of(shard):
            whole.of_mine(shard.gradient).mul_(scale)
        return shard.gradient


def cut(value: Any, piece: Piece) -> Any:
    """The piece's part of a whole state, with zeros in the padding."""
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        return value.clone()
    out = value.new_zeros(piece.stop - piece.start)
    out[: piece.numel] = value.view(-1)[piece.begin : piece.begin + piece.numel]
    return out


def _runs(assignment: Assignment, shards: Sequence[Shard]) -> list[list[Shard]]:
    """Neighbours whose fp32 gradients an update can read where they are; others one by one."""
    runs: list[list[Shard]] = []
    room = 0
    for shard in shards:
        whole = any(slot.name in assignment.whole for slot in shard.bucket.slots)
        joins = not whole and shard.gradient.dtype == shard.master.dtype
        room -= shard.master.numel()
        if runs and joins and room >= 0:
            runs[-1].append(shard)
        else:
            runs.append([shard])
            room = RUN - shard.master.numel() if joins else 0
    return runs


def by_rule(assignment: Assignment, shards: Sequence[Shard]) -> dict[Rule, list[tuple[Shard, Piece]]]:
    """Pieces by rule, but those of parameters that are updated whole."""
    found: dict[Rule, list[tuple[Shard, Piece]]] = {}
    for shard in shards:
        for piece in shard.pieces:
            # Padding without a parameter goes with the bucket's last one.
            name = piece.name or shard.bucket.slots[-1].name
            if name not in assignment.whole:
                found.setdefault(assignment.rule_of[name], []).append((shard, piece))
    return found


def _pieces(assignment: Assignment, shards: Sequence[Shard]) -> Iterable[Pieces]:
    fp32 = all(shard.gradient.dtype == torch.float32 for shard in shards)
    for rule, pieces in by_rule(assignment, shards).items():
        inner = Inner(rule, [(piece.name, shard.master[piece.start : piece.stop]) for shard, piece in pieces])
        yield Pieces(pieces, inner, inner.can_scale and fp32)


def _nothing(shard: Shard) -> None:
    return None
