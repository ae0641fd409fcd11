"""Level 0: every rank keeps all weights and updates them all."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from zero3d.comm.bucket import Bucket
from zero3d.mapped import kept_copy
from zero3d.zero.holding import Holding, point_at
from zero3d.zero.shard import Shard
from zero3d.zero.units import Unit


class WholeWeights:
    """Nothing moves: a rank that has the whole gradient makes the whole update."""

    def __init__(self) -> None:
        self._holdings: list[Holding] = []

    def adopt(
        self, bucket: Bucket, parameters: Sequence[tuple[str, nn.Parameter]], initial: Tensor, dtype: torch.dtype
    ) -> Holding:
        flat = kept_copy(initial, dtype)
        point_at(parameters, bucket, flat)
        holding = Holding(bucket=bucket, parameters=parameters, flat=flat, part=flat)
        self._holdings.append(holding)
        return holding

    def watch(self, model: nn.Module, units: Sequence[Unit]) -> None:
        return None

    def unwatch(self) -> None:
        return None

    def leave(self) -> None:
        return None

    def by_use(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        return shards

    def publish(self, shard: Shard) -> None:
        shard.narrow()

    def write(self, bucket: Bucket, span: slice, values: Tensor) -> None:
        for holding in self._holdings:
            if holding.bucket is bucket:
                holding.flat[span].copy_(values)

    def end_turn(self) -> None:
        return None

    def end_step(self) -> None:
        return None

    def open(self) -> None:
        return None

    def close(self) -> None:
        return None

    def held(self) -> Iterable[tuple[str, Tensor]]:
        return [("weights", holding.flat) for holding in self._holdings]
