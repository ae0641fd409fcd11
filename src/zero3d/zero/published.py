"""Levels 1 and 2: weights are whole everywhere; each rank updates its shard and sends it to the others.

The gather of new weights starts as soon as a shard is updated and goes on while later shards are updated and into
the next forward, which waits, unit by unit, only for what it uses. So does an update that is made elsewhere: its gather
starts when the forward comes to it, and those of the shards before it then too, as ranks that use other modules must
start the same gathers in the same order; what is left starts at the end of the forward.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero3d.comm.bucket import Bucket
from zero3d.comm.done import DONE
from zero3d.contracts import Axis, Pending
from zero3d.mapped import kept_copy
from zero3d.recompute import untraced
from zero3d.zero.guard import Guard
from zero3d.zero.holding import Holding, point_at
from zero3d.zero.shard import Shard
from zero3d.zero.units import Unit


class PublishedWeights:
    """`Weights` whose shards are gathered once a step, after the update."""

    def __init__(self, axis: Axis, *, overlap: bool) -> None:
        self._axis = axis
        self._overlap = overlap
        self._holdings: dict[Bucket, Holding] = {}
        self._guards: dict[Bucket, Guard] = {}
        self._updating: dict[Bucket, Shard] = {}
        self._coming: dict[Bucket, Pending] = {}
        self._bucket_of: dict[str, Bucket] = {}
        self._hooks: list[RemovableHandle] = []

    def adopt(
        self, bucket: Bucket, parameters: Sequence[tuple[str, nn.Parameter]], initial: Tensor, dtype: torch.dtype
    ) -> Holding:
        flat = kept_copy(initial, dtype)
        point_at(parameters, bucket, flat)
        part = flat[bucket.shard(self._axis.index)]
        holding = Holding(bucket=bucket, parameters=parameters, flat=flat, part=part)
        self._holdings[bucket] = holding
        self._guards[bucket] = Guard(parameters, self._wait_for)
        self._bucket_of.update((name, bucket) for name, _ in parameters)
        return holding

    def watch(self, model: nn.Module, units: Sequence[Unit]) -> None:
        plain = untraced(model)
        self._hooks = [
            unit.module.register_forward_pre_hook(plain(lambda *_, names=unit.needs: self._wait_for(*names)))
            for unit in units
        ]
        spread = plain(lambda *_: self._spread_all())
        self._hooks.append(model.register_forward_hook(spread, always_call=True))

    def unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.open()

    def leave(self) -> None:
        self.open()

    def by_use(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        return shards

    def publish(self, shard: Shard) -> None:
        shard.narrow()
        bucket = shard.bucket
        if shard.updated is not DONE:
            self._updating[bucket] = shard
            self._guards[bucket].close()
        else:
            self._spread(shard)
        if not self._overlap:
            self._receive(bucket)

    def write(self, bucket: Bucket, span: slice, values: Tensor) -> None:
        self._receive(bucket)
        self._holdings[bucket].flat[span].copy_(values)

    def end_turn(self) -> None:
        return None

    def end_step(self) -> None:
        return None

    def open(self) -> None:
        self._spread_all()
        for bucket in list(self._coming):
            self._receive(bucket)

    def close(self) -> None:
        return None

    def held(self) -> Iterable[tuple[str, Tensor]]:
        return [("weights", holding.flat) for holding in self._holdings.values()]

    def _wait_for(self, *names: str) -> None:
        if self._coming or self._updating:
            for name in names:
                self._receive(self._bucket_of[name])

    def _spread(self, shard: Shard) -> None:
        bucket = shard.bucket
        coming = self._axis.all_gather(self._holdings[bucket].flat, shard.weights, f"weights of {bucket.label}")
        if coming is not DONE:
            self._coming[bucket] = coming
            self._guards[bucket].close()
        elif self._guards[bucket].closed:
            self._guards[bucket].open()

    def _spread_all(self) -> None:
        while self._updating:
            self._spread_next()

    def _spread_next(self) -> None:
        bucket, shard = next(iter(self._updating.items()))
        shard.updated.wait()  # What went wrong with it is raised whenever somebody comes to it.
        del self._updating[bucket]
        self._spread(shard)

    def _receive(self, bucket: Bucket) -> None:
        while bucket in self._updating:
            self._spread_next()
        pending = self._coming.pop(bucket, None)
        if pending is not None:
            pending.wait()
            self._guards[bucket].open()
