"""My copy of the model over dp: buckets, shards and lanes put together; the same for every level."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zero3d.comm.done import DONE
from zero3d.comm.flat import Pool
from zero3d.contracts import Axis
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
        self._axis = axis
        self._pool = pool
        self._weights = weights
        self._frozen = frozen
        self._trained = trained
        self._reducer = reducer
        # Autograd holds what these hooks hold where Python's collector cannot see it: `close` lets go.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_arrival(reducer, lane, index))
            for holding, _, lane in trained
            for index, (_, parameter) in enumerate(holding.parameters)
        ]

    @contextmanager
    def turn(self, stage: int, first: bool, last: bool) -> Iterator[None]:
        """Round one backward. Gradients of parameters that it does not reach count as zero."""
        self._reducer.begin(first, last)
        yield
        self._reducer.end()
        self._weights.end_turn()

    def finish(self) -> Sequence[Shard]:
        spreading = self._reducer.finish()
        for _, shard, lane in self._trained:
            shard.scaled = 1.0
            shard.coming = spreading.get(lane, DONE)
        return self.shards

    def close(self) -> None:
        """Gradients are the user's again."""
        for hook in self._hooks:
            hook.remove()

    def publish(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            self._weights.publish(shard)

    def norms(self) -> list[Tensor]:
        """Norms of groups of 64 elements of what landed here, fp64, bucket by bucket."""
        return [lane.norms for _, _, lane in self._trained if lane.norms is not None]

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
        shapes = {info.name: info for info in infos}
        for holding, shard, _ in self._trained:
            yield from self._tensors(holding, shard.master, shapes)
        for holding in self._frozen:
            yield from self._tensors(holding, holding.part, shapes)

    def rank_0s(self, buffer: Tensor, name: str) -> Tensor:
        """A copy of rank 0's value of a buffer: ranks may have written their own."""
        copy = buffer.detach().clone(memory_format=torch.contiguous_format)
        if copy.numel():
            self._axis.broadcast(copy.view(-1).view(torch.uint8), 0, f"buffer {name}").wait()
        return copy

    def gradient_of(self, info: ParamInfo) -> Tensor:
        """The whole sum over ranks and micro-batches of one trainable parameter's gradient."""
        for holding, shard, _ in self._trained:
            shard.coming.wait()
            found = dict(self._tensors(holding, shard.gradient, {info.name: info}))
            if found:
                return found[info.name].float().div_(shard.scaled)
        raise KeyError(info.name)

    def wire_dtypes(self) -> list[torch.dtype]:
        """Of gradients as they travel, lane by lane."""
        return [lane.wire for _, _, lane in self._trained]

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of all that the replica holds; tensors may share memory."""
        yield from self._weights.held()
        for _, shard, lane in self._trained:
            yield ("weights" if shard.weights.data_ptr() == shard.master.data_ptr() else "optimizer"), shard.master
            for tensor in (lane.landing, lane.kept, lane.spread):
                if tensor is not None:
                    yield "gradients", tensor
        for buffer in self._pool:
            yield "buffers", buffer

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


def _arrival(reducer: Reducer, lane: Lane, index: int) -> Callable[[nn.Parameter], None]:
    def arrived(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        reducer.arrived(lane, index, gradient.reshape(-1))

    return arrived
