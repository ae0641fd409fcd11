"""What a trained bucket gets besides its weights: a shard for the optimizer, a lane on which gradients are reduced.

stays    both are beside the weights: gradients are summed where the optimizer reads them
leaves   the shard is of another home: what is reduced goes there, every turn or once a step
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero3d.comm.flat import Pool
from zero3d.contracts import Axis, Home
from zero3d.mapped import fresh, kept_copy
from zero3d.precision import Dtypes
from zero3d.zero.holding import Holding
from zero3d.zero.leaving import Leaving
from zero3d.zero.reducer import Lane
from zero3d.zero.shard import Shard


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Makes them. `shards_optimizer`: each rank of `axis` has its part of it; `every_turn`: gradients are reduced once
    a micro-batch; stored: weights are kept elsewhere, so that they are no master weights."""

    axis: Axis
    pool: Pool
    dtypes: Dtypes
    shards_optimizer: bool
    every_turn: bool
    stored: bool

    def stays(self, holding: Holding, initial: Tensor) -> tuple[Shard, Lane]:
        """`initial`: fp32 [numel] of the whole bucket."""
        bucket, part = holding.bucket, holding.part
        mine = bucket.shard(self.axis.index)
        span = mine if self.shards_optimizer else slice(0, bucket.numel)
        own = part.dtype != torch.float32 or self.stored
        master = kept_copy(initial[span], torch.float32) if own else part
        keeps_whole = not self.shards_optimizer or not self.every_turn
        numel = bucket.numel if keeps_whole else bucket.shard_numel
        held = fresh(numel, self.dtypes.held(part.dtype), self.pool.device)
        landing = held[mine] if keeps_whole else held
        gradient = landing if self.shards_optimizer else held
        shard = Shard(bucket=bucket, span=span, master=master, gradient=gradient, weights=part)
        wire = self.dtypes.wire(part.dtype)
        plain = held.dtype == wire == torch.float32 and not self.every_turn
        at_once = not self.shards_optimizer and plain and self.axis.one_call_sums
        lane = Lane(
            bucket,
            _parameters(holding),
            kept=None if self.every_turn else held,
            landing=landing,
            spread=None if self.shards_optimizer or at_once else held,
            at_once=at_once,
            wire=wire,
            pool=self.pool,
        )
        return shard, lane

    def leaves(self, holding: Holding, initial: Tensor, home: Home) -> tuple[Shard, Lane]:
        """The same where the shard is of `home`."""
        bucket, part = holding.bucket, holding.part
        mine = bucket.shard(self.axis.index)
        held, wire = self.dtypes.held(part.dtype), self.dtypes.wire(part.dtype)
        shard = home.shard(bucket, mine, initial[mine], part, held)
        # A sum over ranks has more bits than its terms; a single term has not.
        travels = wire if self.axis.size == 1 and self.every_turn else held
        lane = Lane(
            bucket,
            _parameters(holding),
            kept=None if self.every_turn else fresh(bucket.numel, held, self.pool.device),
            landing=shard.gradient,
            spread=None,
            at_once=False,
            wire=wire,
            pool=self.pool,
            leaving=(Leaving(home, shard, travels, self.pool), mine),
        )
        return shard, lane


def _parameters(holding: Holding) -> Sequence[nn.Parameter]:
    return [parameter for _, parameter in holding.parameters]
