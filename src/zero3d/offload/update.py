"""The update of shards on the host: each is a job of the update queue, and its new weights one of the queue up.

in time   step k: | forward, backward -> down | update ...        |
                                              | up as each is updated; the next forward waits for what it uses
delayed   step k: | forward, backward -> down | up: what the update of step k - 1 made
                  | update of step k - 1 ...  |
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero3d.comm.bucket import Piece
from zero3d.comm.done import DONE
from zero3d.comm.streams import Staging, Ticket, settled
from zero3d.contracts import Axis, Pending
from zero3d.offload.adamw import Workers
from zero3d.offload.home import HostShard
from zero3d.offload.inner import HostInner
from zero3d.offload.memory import HOST, Memory
from zero3d.offload.queues import Queues
from zero3d.optim.assignment import Assignment
from zero3d.optim.sharded import ShardedOptimizer, by_rule, cut
from zero3d.zero.shard import Shard


class Update:
    """A `Pending`: a shard's update, and that its weights are up. `lifting`: what is to be round the latter."""

    def __init__(self, lifting: AbstractContextManager[None]) -> None:
        self.lifting = lifting
        self.job: Pending = DONE
        self.up: Pending = DONE

    def wait(self) -> None:
        self.job.wait()
        self.up.wait()


class HostPieces:
    """The pieces of one shard, by rule, and the state of all of them: one tensor for each key."""

    def __init__(self, assignment: Assignment, shard: HostShard, workers: Workers, memory: Memory) -> None:
        self._shard = shard
        self._memory = memory
        self.states: dict[tuple[str, torch.dtype], Tensor] = {}
        self._others: dict[tuple[object, ...], Tensor] = {}
        self._parts: list[tuple[list[Piece], HostInner]] = []
        for rule, found in by_rule(assignment, [shard]).items():
            pieces = [piece for _, piece in found]
            named = [(piece.name, shard.master[piece.start : piece.stop]) for piece in pieces]
            self._parts.append((pieces, HostInner(rule, named, workers, partial(self._state, pieces))))

    def keep(self) -> None:
        """What an optimizer made as state by itself is kept with the master weights from now on; what it keeps twice,
        once."""
        for pieces, inner in self._parts:
            for index, piece in enumerate(pieces):
                found: dict[int, Tensor] = {}
                for key, value in inner.fresh_state(index):
                    if id(value) not in found:
                        found[id(value)] = self._kept(pieces, index, piece, key, value)
                    inner.replace_state(index, key, found[id(value)])

    def _kept(self, pieces: Sequence[Piece], index: int, piece: Piece, key: str, value: Tensor) -> Tensor:
        if value.numel() == piece.stop - piece.start:
            return self._state(pieces, index, key, value.dtype).view(value.shape).copy_(value)
        other = piece.start, key, value.dtype, value.shape
        if other in self._others:  # Made anew, as some do in every step.
            return self._others[other].copy_(value)
        self._others[other] = self._memory.keep(f"{self._shard.bucket.label} {piece.name} {key}", value)
        return self._others[other]

    def _state(self, pieces: Sequence[Piece], index: int, key: str, dtype: torch.dtype) -> Tensor:
        """Of one piece [n], zeros at first."""
        if (key, dtype) not in self.states:
            label = f"{self._shard.bucket.label} {key}"
            self.states[key, dtype] = self._memory.zeros(label, self._shard.master.numel(), dtype)
        return self.states[key, dtype][pieces[index].start : pieces[index].stop]

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


class OffloadedOptimizer:
    """The `Optimizer` of shards on the host, and of those on the device beside them.

    shards: in the order in which a forward wants their weights, which is that of the updates
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
        workers: Workers,
        delay: int,
        weights_here: bool,
    ) -> None:
        self._away = [shard for shard in shards if isinstance(shard, HostShard)]
        self._near = [shard for shard in shards if not isinstance(shard, HostShard)]
        self._beside = ShardedOptimizer(assignment, self._near, axis)
        self._pieces = {shard: HostPieces(assignment, shard, workers, memory) for shard in self._away}
        self._queues = queues
        self._staging = staging
        self._memory = memory
        self._device = device
        self._delay = delay
        self._weights_here = weights_here
        self._updates = 0
        self._late: dict[HostShard, Pending] = {}
        self._unused: frozenset[str] = frozenset()
        self._before_update: Callable[[Shard], None] = _nothing
        self._peak = self.learning_rate = assignment.learning_rate

    def leave(self, unused: frozenset[str]) -> None:
        """The next step has no gradient for these parameters."""
        self._unused = unused
        self._beside.leave(unused)

    def ask_before_update(self, call: Callable[[Shard], None]) -> None:
        """`call` comes, on the queue of updates, before a shard's master weights and state change."""
        self._before_update = call
        self._beside.ask_before_update(call)

    def step(self, shards: Iterable[Shard], lr: float, scale: float) -> Iterable[Shard]:
        """Shards on the host come back at once, to be waited for (`Shard.updated`) by those who use them."""
        self.learning_rate = self._peak * lr
        delays = 0 < self._delay <= self._updates
        self._updates += 1
        yield from self.flush()
        ahead = [*self._away[1:], None]
        for shard, after in zip(self._away, ahead):
            before, label = shard.updated, shard.bucket.label
            update = Update(self._queues.up.announce(label))
            job = partial(self._update, update, before, shard, shard.gradient, after, lr, scale, self._unused, delays)
            update.job = shard.updating = self._queues.update.put(job, label)
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
            named = [piece for piece in shard.pieces if piece.name in states]
            self.set_state_of(
                shard,
                {piece.name: {key: cut(value, piece) for key, value in states[piece.name].items()} for piece in named},
            )
        self._beside.set_states(states)

    def keys_of_state(self) -> Mapping[str, frozenset[str]]:
        return self._beside.keys_of_state()

    @property
    def updates_whole(self) -> Mapping[str, bool]:
        return self._beside.updates_whole

    def set_state_of(self, shard: Shard, states: Mapping[str, Mapping[str, Any]]) -> None:
        """The inverse of `state_of`."""
        shard.settle()
        if not isinstance(shard, HostShard):
            self._beside.set_state_of(shard, states)
            return
        for piece, inner, index in self._pieces[shard].each():
            if piece.name in states:
                inner.set_state(index, {key: _to_host(value) for key, value in states[piece.name].items()})
        self._pieces[shard].keep()

    def set_whole_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        self._beside.set_whole_state(states)

    def flush(self) -> Iterable[Shard]:
        """Late weights come up now: what the next step computes with is what the last update made."""
        late, self._late = self._late, {}
        for shard, made in late.items():
            shard.updated = self._bring_up(shard, made)
            yield shard

    def go_on_from(self, updates: int) -> None:
        """So many updates were made already, and none is late."""
        self._updates, self._late = updates, {}

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
        self._before_update(shard)
        if after is not None:
            self._memory.ahead(self._kept(after))
        pieces = self._pieces[shard]
        if delays:
            pieces.step(gradient, None, lr, scale, unused)
        elif self._weights_here:
            pieces.step(gradient, None if shard.weights is shard.master else shard.weights, lr, scale, unused)
        else:
            lent = self._staging.take(shard.weights.numel(), shard.weights.dtype)

            def lift() -> None:
                with lent as new:
                    self._lift(new, shard)

            try:
                pieces.step(gradient, lent.tensor, lr, scale, unused)
                update.up = self._queues.up.put(lift, shard.bucket.label, update.lifting)
            except BaseException:
                lent.give()  # The updates behind would wait for it without end.
                raise
        pieces.keep()
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

        return self._queues.up.put(lift, shard.bucket.label)

    def _lift(self, new: Tensor, shard: HostShard) -> None:
        shard.weights.copy_(new, non_blocking=True)
        settled(self._device)

    def _kept(self, shard: HostShard) -> list[Tensor]:
        return [shard.master, *self._pieces[shard].states.values()]


def _to_host(value: Any) -> Any:
    return value.to(HOST) if isinstance(value, Tensor) else value


def _nothing(shard: Shard) -> None:
    return None
