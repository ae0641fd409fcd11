"""The update of shards on the host: each is a job of the update queue, and its new weights one of the queue up.

in time   step k: | forward, backward -> down | update ...        |
                                              | up as each is updated; the next forward waits for what it uses
delayed   step k: | forward, backward -> down | up: what the update of step k - 1 made
                  | update of step k - 1 ...  |
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero3d.comm.bucket import Piece
from zero3d.comm.done import DONE
from zero3d.comm.streams import Staging, Ticket, settled
from zero3d.contracts import Axis, Pending
from zero3d.offload.home import HostShard
from zero3d.offload.inner import HostInner
from zero3d.offload.memory import HOST, Memory
from zero3d.offload.queues import Queues
from zero3d.optim.assignment import Assignment
from zero3d.optim.sharded import ShardedOptimizer, by_rule, cut
from zero3d.zero.shard import Shard


class Update:
    """A `Pending`: a shard's update, and that its weights are up."""

    def __init__(self) -> None:
        self.job: Pending = DONE
        self.up: Pending = DONE

    def wait(self) -> None:
        self.job.wait()
        self.up.wait()


class HostPieces:
    """The pieces of one shard, by rule."""

    def __init__(self, assignment: Assignment, shard: HostShard, threads: int) -> None:
        self._parts = [
            (
                [piece for _, piece in pieces],
                HostInner(rule, [(piece.name, shard.master[piece.start : piece.stop]) for _, piece in pieces], threads),
            )
            for rule, pieces in by_rule(assignment, [shard]).items()
        ]

    def step(self, gradient: Tensor, out: Tensor | None, lr: float, scale: float, unused: frozenset[str]) -> None:
        for pieces, inner in self._parts:
            spans = [slice(piece.start, piece.stop) for piece in pieces]
            left = [piece.name in unused for piece in pieces]
            inner.step_into(
                [None if leave else gradient[span] for leave, span in zip(left, spans)],
                [None if out is None else out[span] for span in spans],
                lr,
                scale,
            )

    def each(self) -> Iterator[tuple[Piece, HostInner, int]]:
        """(piece, its optimizer, its place there)."""
        for pieces, inner in self._parts:
            for index, piece in enumerate(pieces):
                yield piece, inner, index

    def close(self) -> None:
        for _, inner in self._parts:
            inner.close()


class OffloadedOptimizer:
    """The `Optimizer` of shards on the host, and of those on the device beside them.

    delay: the update of step k is begun when step k + 1 has its gradients, from this many updates on; 0: never
    weights_here: the weights that the model computes with are on the host as well: an update writes them there
    """

    def __init__(
        self,
        assignment: Assignment,
        shards: Sequence[Shard],
        axis: Axis,
        *,
        queues: Queues,
        staging: Staging,
        memory: Memory,
        device: torch.device,
        threads: int,
        delay: int,
        weights_here: bool,
    ) -> None:
        self._away = [shard for shard in shards if isinstance(shard, HostShard)]
        self._near = [shard for shard in shards if not isinstance(shard, HostShard)]
        self._beside = ShardedOptimizer(assignment, self._near, axis)
        self._pieces = {shard: HostPieces(assignment, shard, threads) for shard in self._away}
        self._states: dict[HostShard, dict[str, Tensor]] = {shard: {} for shard in self._away}
        self._queues = queues
        self._staging = staging
        self._memory = memory
        self._device = device
        self._delay = delay
        self._weights_here = weights_here
        self._updates = 0
        self._late: dict[HostShard, Pending] = {}
        self._unused: frozenset[str] = frozenset()
        self._peak = self.learning_rate = assignment.learning_rate

    def leave(self, unused: frozenset[str]) -> None:
        """The next step has no gradient for these parameters."""
        self._unused = unused
        self._beside.leave(unused)

    def step(self, shards: Iterable[Shard], lr: float, scale: float) -> Iterable[Shard]:
        """Shards on the host come back at once, to be waited for (`Shard.updated`) by those who use them."""
        self.learning_rate = self._peak * lr
        delays = 0 < self._delay <= self._updates
        self._updates += 1
        for shard, made in self._late.items():
            shard.updated = self._bring_up(shard, made)
            yield shard
        self._late = {}
        ahead = [*self._away[1:], None]
        for shard, after in zip(self._away, ahead):
            before, update = shard.updated, Update()
            job = partial(self._update, update, before, shard, shard.gradient, after, lr, scale, self._unused, delays)
            update.job = shard.updating = self._queues.update.put(job)
            if delays:
                self._late[shard] = update.job
            else:
                shard.updated = update
                yield shard
        yield from self._beside.step(self._near, lr, scale)

    def state_of(self, shard: Shard) -> Mapping[str, Mapping[str, Tensor]]:
        shard.settle()
        if not isinstance(shard, HostShard):
            return self._beside.state_of(shard)
        return {piece.name: inner.state()[index] for piece, inner, index in self._pieces[shard].each()}

    def whole_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._beside.whole_state()

    def set_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Whole optimizer states by parameter name, the same on every rank, become those of the pieces."""
        for shard in self._away:
            shard.settle()
            for piece, inner, index in self._pieces[shard].each():
                if piece.name in states:
                    own = {key: _to_host(cut(value, piece)) for key, value in states[piece.name].items()}
                    inner.set_state(index, own)
            self._keep(shard)
        self._beside.set_states(states)

    def fetch(self) -> None:
        self._beside.fetch()

    def held(self) -> Iterable[tuple[str, Tensor]]:
        for shard in self._away:
            shard.settle()
            for _, inner, index in self._pieces[shard].each():
                for value in inner.state()[index].values():
                    if isinstance(value, Tensor):
                        yield (self._memory.kind if value.dim() else "buffers"), value
        yield from self._beside.held()

    def close(self) -> None:
        """Waits for what is under way."""
        for shard in self._away:
            shard.settle()
            self._pieces[shard].close()

    def _update(
        self,
        update: Update,
        before: Pending,
        shard: HostShard,
        gradient: Tensor,
        after: HostShard | None,
        lr: float,
        scale: float,
        unused: frozenset[str],
        delays: bool,
    ) -> None:
        """On the update queue."""
        before.wait()  # Its weights may still be on their way up.
        if after is not None:
            self._memory.ahead(self._kept(after))
        pieces = self._pieces[shard]
        if delays:
            pieces.step(gradient, None, lr, scale, unused)
        elif self._weights_here:
            pieces.step(gradient, None if shard.weights is shard.master else shard.weights, lr, scale, unused)
        else:
            lent = self._staging.take(shard.weights.numel(), shard.weights.dtype)
            pieces.step(gradient, lent.tensor, lr, scale, unused)

            def lift() -> None:
                with lent as new:
                    self._lift(new, shard)

            update.up = self._queues.up.put(lift)
        self._keep(shard)
        self._memory.behind(self._kept(shard))

    def _bring_up(self, shard: HostShard, made: Pending) -> Ticket:
        """The weights that the update before has `made`, late."""

        def lift() -> None:
            made.wait()
            if self._weights_here:
                if shard.weights is not shard.master:
                    shard.weights.copy_(shard.master)
                return
            with self._staging.take(shard.weights.numel(), shard.weights.dtype) as new:
                new.copy_(shard.master)
                self._lift(new, shard)

        return self._queues.up.put(lift)

    def _lift(self, new: Tensor, shard: HostShard) -> None:
        shard.weights.copy_(new, non_blocking=True)
        settled(self._device)

    def _keep(self, shard: HostShard) -> None:
        """What the optimizer made as state is kept with the master weights from now on: of a shard's pieces in one
        tensor for each key."""
        for piece, inner, index in self._pieces[shard].each():
            for key, value in inner.fresh_state(index):
                span = slice(piece.start, piece.stop)
                if value.numel() == piece.stop - piece.start:
                    kept = self._state_like(shard, key, value)[span].view(value.shape).copy_(value)
                else:
                    kept = self._memory.keep(f"{shard.bucket.label} {piece.name} {key}", value)
                inner.replace_state(index, key, kept)

    def _state_like(self, shard: HostShard, key: str, value: Tensor) -> Tensor:
        """The state `key` of a shard [n], zeros at first."""
        states = self._states[shard]
        if key not in states:
            states[key] = self._memory.zeros(f"{shard.bucket.label} {key}", shard.master.numel(), value.dtype)
        return states[key]

    def _kept(self, shard: HostShard) -> list[Tensor]:
        return [shard.master, *self._states[shard].values()]


def _to_host(value: Any) -> Any:
    return value.to(HOST) if isinstance(value, Tensor) else value
