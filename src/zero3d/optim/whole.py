"""Parameters whose optimizer state is whole on one rank, their owner; for optimizers that look at whole matrices.

Shards stay cut as they are, and their master weights stay the truth. In an update

    gradients    each rank sends its piece of the gradient to the owner
    the update   the owner's optimizer updates its whole fp32 copy, in the parameter's own shape
    weights      the owner sends each rank its piece of the new weights, into its shard

so over all ranks each element outside the owner's shard is sent twice, in fp32: about 8 (N-1)/N bytes an element on
N ranks, divided among them. Where a shard has all of a parameter, its optimizer works in place and nothing moves: on
the owner, or on every rank where all hold everything.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero3d.comm.bucket import Piece
from zero3d.comm.flat import Pool
from zero3d.contracts import Axis, Pending
from zero3d.optim.assignment import Assignment
from zero3d.optim.inner import Inner
from zero3d.zero.shard import Shard


@dataclass(frozen=True, eq=False, kw_only=True)
class Whole:
    """One such parameter. `mine`: what this rank's shard has of it; `others`: what other ranks send to and get from
    the `owner`; `weights`: fp32, of its own shape, where this rank updates it."""

    name: str
    shard: Shard
    owner: int
    mine: Piece | None
    others: Sequence[tuple[int, Piece]]
    weights: Tensor | None
    inner: Inner | None

    def of_mine(self, flat: Tensor) -> Tensor:
        """My piece in a tensor of the shard, [0] where I have none."""
        piece = self.mine
        return flat[piece.start : piece.start + piece.numel] if piece else flat[:0]

    def in_place(self) -> bool:
        return self.mine is not None and self.weights is not None and self.mine.numel == self.weights.numel()


class WholeParameters:
    """All of them, shard by shard. Calls come in the same order on every rank."""

    def __init__(self, assignment: Assignment, shards: Sequence[Shard], axis: Axis) -> None:
        self._axis = axis
        self._of = {shard: list[Whole]() for shard in shards}
        self._arriving: dict[Whole, tuple[Tensor, list[Pending]]] = {}
        self._flying: dict[Shard, list[Pending]] = {}
        self._pool = Pool(shards[0].master.device if shards else torch.device("cpu"))
        cut = {shard: _pieces_by_rank(shard, assignment.whole, axis.size) for shard in shards}
        self.owners = balanced(
            {
                name: [pieces[rank].numel if rank in pieces else 0 for rank in range(axis.size)]
                for found in cut.values()
                for name, pieces in found.items()
            },
            axis.size,
        )
        for shard, found in cut.items():
            for name, pieces in found.items():
                self._of[shard].append(self._whole(assignment, shard, name, pieces))
        self.fetch()

    def of(self, shard: Shard) -> Sequence[Whole]:
        return self._of[shard]

    def fetch(self) -> None:
        """The owners' copies become what the master weights are: at the start, and when those were written to.
        Collective."""
        for whole in self._all():
            label = f"first weights of {whole.name} for their owner"
            flat = whole.weights.view(-1) if whole.weights is not None else None
            for pending in self._to_owner(whole, whole.shard.master, flat, label):
                pending.wait()

    def send_gradients(self, shard: Shard, unused: frozenset[str]) -> None:
        """Starts to bring the gradients to their owners."""
        self._flying[shard] = []
        for whole in self._of[shard]:
            if whole.name in unused:
                continue
            landing = None
            if whole.weights is not None and not whole.in_place():
                landing = self._pool.take(whole.weights.numel(), shard.gradient.dtype)
            pending = self._to_owner(whole, shard.gradient, landing, f"gradient of {whole.name} for its owner")
            if landing is not None:
                self._arriving[whole] = landing, pending
            else:
                self._flying[shard] += pending

    def update(self, shard: Shard, lr: float, scale: float, unused: frozenset[str]) -> None:
        """Updates what this rank owns, and starts to send it. `scale`: of gradients that are held in 16 bits; fp32
        ones are scaled already."""
        for whole in self._of[shard]:
            if whole.name in unused:
                continue
            if whole.inner is not None and whole.weights is not None:
                gradient = self._arrived(whole)
                exact = gradient if gradient.dtype == torch.float32 else gradient.float().mul_(scale)
                whole.inner.step([exact.view(whole.weights.shape)], lr)
                if not whole.in_place():
                    self._pool.give(gradient)
            self._flying[shard] += self._from_owner(whole)

    def finish(self, shard: Shard) -> None:
        """The shard has its new weights, and its gradient is free."""
        for pending in self._flying.pop(shard):
            pending.wait()

    @property
    def here(self) -> dict[str, bool]:
        """Of each whether this rank updates it: its owner does, and where all ranks hold everything all of them."""
        return {whole.name: whole.inner is not None for whole in self._all()}

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        """Optimizer state of the parameters that this rank owns, by name: each is on one rank of the axis."""
        return {
            whole.name: whole.inner.state()[0]
            for whole in self._all()
            if whole.inner is not None and whole.owner == self._axis.index
        }

    def set_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """The other way round, from all states."""
        for whole in self._all():
            if whole.inner is not None and whole.name in states:
                whole.inner.set_state(0, {key: _copy(value) for key, value in states[whole.name].items()})

    def held(self) -> Iterable[tuple[str, Tensor]]:
        for whole in self._all():
            if whole.weights is not None and not whole.in_place():
                yield "optimizer", whole.weights
            if whole.inner is not None:
                yield from whole.inner.held()
        for buffer in self._pool:
            yield "buffers", buffer

    def _all(self) -> Iterable[Whole]:
        return (whole for found in self._of.values() for whole in found)

    def _whole(self, assignment: Assignment, shard: Shard, name: str, pieces: Mapping[int, Piece]) -> Whole:
        shape = assignment.whole[name]
        everywhere = shard.span == slice(0, shard.bucket.numel)
        mine = next((piece for piece in shard.pieces if piece.name == name), None)
        owner = self.owners[name]
        weights: Tensor | None = None
        if mine is not None and mine.numel == sum(piece.numel for piece in pieces.values()):
            weights = shard.master[mine.start : mine.start + mine.numel].view(shape)
        if owner != self._axis.index and not everywhere:
            weights = None
        elif weights is None:
            weights = torch.empty(shape, dtype=torch.float32, device=shard.master.device)
        return Whole(
            name=name,
            shard=shard,
            owner=owner,
            mine=mine,
            others=() if everywhere else [(rank, piece) for rank, piece in pieces.items() if rank != owner],
            weights=weights,
            inner=None if weights is None else Inner(assignment.rule_of[name], [(name, weights)]),
        )

    def _to_owner(self, whole: Whole, flat: Tensor, landing: Tensor | None, label: str) -> list[Pending]:
        """Every rank's piece in `flat`, a tensor of the shard, into the owner's `landing`, flat too."""
        pending = []
        if landing is not None and whole.mine is not None and not whole.in_place():
            begin = whole.mine.begin
            landing[begin : begin + whole.mine.numel].copy_(whole.of_mine(flat))
        for rank, piece in whole.others:
            if rank == self._axis.index:
                pending.append(self._axis.send(whole.of_mine(flat), whole.owner, label))
            elif landing is not None:
                pending.append(self._axis.recv(landing[piece.begin : piece.begin + piece.numel], rank, label))
        return pending

    def _from_owner(self, whole: Whole) -> list[Pending]:
        """The owner's weights into every rank's shard."""
        label, pending = f"new weights of {whole.name}", list[Pending]()
        flat = whole.weights.view(-1) if whole.weights is not None else None
        if flat is not None and whole.mine is not None and not whole.in_place():
            whole.of_mine(whole.shard.master).copy_(flat[whole.mine.begin : whole.mine.begin + whole.mine.numel])
        for rank, piece in whole.others:
            if rank == self._axis.index:
                pending.append(self._axis.recv(whole.of_mine(whole.shard.master), whole.owner, label))
            elif flat is not None:
                pending.append(self._axis.send(flat[piece.begin : piece.begin + piece.numel], rank, label))
        return pending

    def _arrived(self, whole: Whole) -> Tensor:
        """The whole gradient, flat."""
        if whole.in_place():
            return whole.of_mine(whole.shard.gradient)
        landing, pending = self._arriving.pop(whole)
        for one in pending:
            one.wait()
        return landing


def balanced(held: Mapping[str, Sequence[int]], ranks: int) -> dict[str, int]:
    """Parameter -> its owner: the largest first, each to the rank that owns the fewest elements by then, and of equal
    ones to that which has most of it already. `held`: elements of each parameter in each rank's shard.

    >>> balanced({"a": [4, 4], "b": [0, 6], "c": [2, 0]}, ranks=2)
    {'a': 0, 'b': 1, 'c': 1}
    """
    owned = [0] * ranks
    owners = {}
    for name in sorted(held, key=lambda name: -sum(held[name])):
        owner = min(range(ranks), key=lambda rank: (owned[rank], -held[name][rank]))
        owners[name] = owner
        owned[owner] += sum(held[name])
    return owners


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _pieces_by_rank(shard: Shard, names: Iterable[str], ranks: int) -> dict[str, dict[int, Piece]]:
    """Parameter -> rank -> the piece of it in that rank's shard of the bucket."""
    wanted, found = frozenset(names), dict[str, dict[int, Piece]]()
    for rank in range(ranks):
        for piece in shard.bucket.pieces(shard.bucket.shard(rank)):
            if piece.name in wanted:
                found.setdefault(piece.name, {})[rank] = piece
    return found
