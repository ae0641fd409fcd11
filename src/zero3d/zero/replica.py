"""My copy of the model over dp: buckets, shards and lanes put together; the same for every level."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zero3d.comm.bucket import aligned
from zero3d.comm.done import DONE
from zero3d.comm.flat import Pool
from zero3d.comm.ranges import elements, put
from zero3d.contracts import Axis
from zero3d.exact import GROUP, group_norms
from zero3d.params import ParamInfo
from zero3d.zero.holding import Holding, Weights
from zero3d.zero.reducer import Lane, Reducer
from zero3d.zero.shard import Shard


class ZeroReplica:
    """The `Replica` of every level; what differs is `weights`, and what shards and lanes were made with."""

    def __init__(
        self,
        *,
        axis: Axis,
        pool: Pool,
        weights: Weights,
        frozen: Sequence[Holding],
        trained: Sequence[tuple[Holding, Shard, Lane]],
        reducer: Reducer,
    ) -> None:
        self.shards = tuple(shard for _, shard, _ in trained)
        self.device = pool.device
        self._axis = axis
        self._pool = pool
        self._weights = weights
        self._frozen = frozen
        self._trained = trained
        self._reducer = reducer
        self._in_turn = False
        self._before_gradient: Callable[[], None] = _nothing
        # Autograd holds what these hooks hold where Python's collector cannot see it: `close` lets go.
        self._hooks = []
        self._lanes: dict[int, tuple[Lane, int]] = {}
        for holding, _, lane in trained:
            for index, (_, parameter) in enumerate(holding.parameters):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrival(lane, index)))
                self._lanes[id(parameter)] = (lane, index)

    def rest(self) -> None:
        """Between two steps: gradients of the one before have no memory until those of the next come."""
        for _, shard, lane in self._trained:
            shard.coming.wait()
            lane.rest()

    @contextmanager
    def turn(self, stage: int, first: bool, last: bool, *, counts: bool = True) -> Iterator[None]:
        """Round one backward. Gradients of parameters that it does not reach count as zero."""
        self.begin_turn(first, last, counts=counts)
        yield
        self.end_turn()

    def begin_turn(self, first: bool, last: bool, *, counts: bool = True) -> None:
        """Before the first gradient of a backward."""
        self._reducer.begin(first, last, counts=counts)
        self._in_turn = True

    def end_turn(self, *, keep: bool = False) -> None:
        """After a backward. `keep`: another goes through its graph, and wants the same weights."""
        self._in_turn = False
        self._reducer.end()
        if not keep:
            self._weights.end_turn()

    def place(self, parameter: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool] | None:
        lane = self._lanes.get(id(parameter))
        return self._reducer.place(*lane, dtype) if self._in_turn and lane else None

    def give_up_turn(self) -> None:
        """The backward ended with an error: the next gradient belongs to another turn."""
        self._in_turn = False

    def forget(self, names: Collection[str]) -> None:
        """What these parameters' gradients added up to so far is zero."""
        for _, shard, lane in self._trained:
            lane.forget(names)
            for piece in shard.pieces:
                if piece.name in names:
                    shard.gradient[piece.start : piece.stop].zero_()

    def ask_before_gradients(self, call: Callable[[], None]) -> None:
        """`call` comes before a gradient outside of a turn: where turns are not announced, it finds them."""
        self._before_gradient = call

    def finish(self, *, keep: bool = False) -> Sequence[Shard]:
        spreading = self._reducer.finish()
        self._weights.end_step()
        if not keep:
            self._weights.end_turn()  # A forward that ended with an error may have left some in use.
        for _, shard, lane in self._trained:
            lane.settle()
            shard.scaled = 1.0
            shard.coming = spreading.get(lane, DONE)
        return self.shards

    def close(self) -> None:
        """Gradients are the user's again, and modules plain; weights can still be gathered, read and written."""
        for hook in self._hooks:
            hook.remove()
        self._weights.unwatch()

    def leave(self) -> None:
        """After `close`: parameters are plain again, for the caller to give them data of their own."""
        self._weights.leave()

    def publish(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            self._weights.publish(shard)

    @property
    def frozen(self) -> list[Shard]:
        """What this rank keeps of parameters that are not trained: as shards without gradients, whose master weights
        are what the model computes with."""
        return [
            Shard(
                bucket=holding.bucket,
                span=holding.bucket.shard(self._axis.index)
                if holding.part.numel() < holding.bucket.numel
                else slice(0, holding.bucket.numel),
                master=holding.part,
                gradient=holding.part[:0],
                weights=holding.part,
            )
            for holding in self._frozen
        ]

    def settle(self) -> None:
        """Updates that still go on are over, and their weights on the device."""
        for shard in self.shards:
            shard.settle()

    def has_changed(self, shards: Iterable[Shard]) -> None:
        """Gradients of these were written to since they were summed."""
        changed = set(shards)
        for _, shard, lane in self._trained:
            if shard in changed:
                lane.norms = None

    @property
    def by_use(self) -> Sequence[Shard]:
        """The shards in the order in which a forward wants their weights."""
        return self._weights.by_use(self.shards)

    def norms(self, uncounted: Collection[str] = ()) -> list[Tensor]:
        """Norms of groups of 64 elements of what landed here, fp64, where it landed; zeros for parameters that are
        `uncounted`."""
        small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        found = []
        for _, _, lane in self._trained:
            out = [slot for slot in lane.bucket.slots if slot.name in uncounted]
            if lane.norms is None and not out:
                small.setdefault((lane.landing.dtype, lane.landing.device), []).append(lane.landing)
                continue
            norms = group_norms(lane.landing) if lane.norms is None else lane.norms
            start = lane.bucket.shard(self._axis.index).start
            for slot in out:
                first, last = (max(slot.offset + edge - start, 0) for edge in (0, aligned(slot.numel)))
                norms[first // GROUP : last // GROUP] = 0
            found.append(norms)
        found += [group_norms(torch.cat(landings)) for landings in small.values()]
        return found

    def arrivals(self) -> dict[str, int]:
        """How many gradients each trainable parameter got on this rank in the step."""
        return {
            slot.name: count for _, _, lane in self._trained for slot, count in zip(lane.bucket.slots, lane.arrivals)
        }

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are whole and plain inside."""
        self._weights.open()
        try:
            yield
        finally:
            self._weights.close()

    def whole(self, infos: Sequence[ParamInfo]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) bucket by bucket; trainable ones from the master weights, so in fp32."""
        self.settle()
        shapes = {info.name: info for info in infos}
        for holding, shard, _ in self._trained:
            yield from self._tensors(holding, shard.master.to(self.device), shapes)
        for holding in self._frozen:
            yield from self._tensors(holding, holding.part.to(self.device), shapes)

    def weight_of(self, info: ParamInfo, span: slice) -> Tensor:
        """Elements `span` of a flattened parameter, on every rank: of master weights in fp32 where it is trained."""
        self.settle()
        for holding, shard, at in self._found(info, span):
            part = holding.part if shard is None else shard.master.to(self.device)
            return elements(self._axis, holding.bucket, part, at, self.device)
        return torch.empty(0, device=self.device)

    def gradient_of(self, info: ParamInfo, span: slice) -> Tensor:
        """The same of a trained parameter's gradient: its sum over ranks and micro-batches, fp32."""
        self.settle()
        for _, _, lane in self._trained:  # They rest where a step has ended before its first gradient.
            lane.wake()
        for holding, shard, at in self._found(info, span):
            assert shard is not None
            shard.coming.wait()
            found = elements(self._axis, holding.bucket, shard.gradient.to(self.device), at, self.device)
            return found.float().div_(shard.scaled)
        return torch.empty(0, device=self.device)

    def write(self, info: ParamInfo, span: slice, values: Tensor) -> None:
        """Elements `span` of a flattened parameter become `values`, which are the same on every rank."""
        self.settle()
        for holding, shard, at in self._found(info, span):
            self._weights.write(holding.bucket, at, values)
            if shard is not None:
                put(shard.master, shard.span, values, at)

    def wire_dtypes(self) -> list[torch.dtype]:
        """Of gradients as they travel, lane by lane."""
        return [lane.wire for _, _, lane in self._trained]

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of all that the replica holds; tensors may share memory."""
        yield from self._weights.held()
        for _, shard, lane in self._trained:
            yield from shard.held()
            for tensor in (lane.kept, lane.spread):
                if tensor is not None:
                    yield "gradients", tensor
        for buffer in (*self._pool, *self._axis.held()):
            yield "buffers", buffer

    def lent(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of what was made in the step and whose memory is another's that is held."""
        for _, _, lane in self._trained:
            if lane.lent is not None:
                yield "gradients", lane.lent

    def _found(self, info: ParamInfo, span: slice) -> Iterator[tuple[Holding, Shard | None, slice]]:
        """Where elements `span` of a parameter are: one place, or none where it has no elements."""
        places = [*((holding, shard) for holding, shard, _ in self._trained), *((one, None) for one in self._frozen)]
        for holding, shard in places:
            for slot in holding.bucket.slots:
                if slot.name == info.name:
                    yield holding, shard, slice(slot.offset + span.start, slot.offset + span.stop)

    def _tensors(self, holding: Holding, part: Tensor, infos: dict[str, ParamInfo]) -> Iterator[tuple[str, Tensor]]:
        if not any(slot.name in infos for slot in holding.bucket.slots):
            return
        whole = part
        if part.numel() < holding.bucket.numel:
            whole = torch.empty(holding.bucket.numel, dtype=part.dtype, device=part.device)
            self._axis.all_gather(whole, part, f"whole {holding.bucket.label}").wait()
        for slot in holding.bucket.slots:
            info = infos.get(slot.name)
            if info is not None:
                flat = whole[slot.offset : slot.offset + slot.numel]
                yield info.name, flat.view(info.shape).clone()

    def _arrival(self, lane: Lane, index: int) -> Callable[[nn.Parameter], None]:
        def arrived(parameter: nn.Parameter) -> None:
            if not self._in_turn:
                self._before_gradient()
            self._reducer.arrived(lane, index)

        return arrived


def _nothing() -> None:
    return None
