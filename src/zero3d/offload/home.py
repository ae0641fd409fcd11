"""Master weights, summed gradients and optimizer state on the host, while the weights stay on the device.

A gradient leaves as soon as it is reduced: through one of two staging buffers into the sum of the shard, which its
update reads. With a delayed update the next step's sum comes while the last one's is read, so there are two.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero3d.comm.bucket import Bucket
from zero3d.comm.done import DONE
from zero3d.comm.streams import Staging, settled
from zero3d.contracts import Pending
from zero3d.exact import group_norms
from zero3d.mapped import fresh
from zero3d.offload.memory import HOST, Memory
from zero3d.offload.queues import Queues
from zero3d.zero.shard import Shard

UNDER_WAY = 64
"""Gradients on their way of which none has been waited for. Sums that the device keeps anyway need no room made, and
without an end to it these would be remembered for ever."""


@dataclass(eq=False, kw_only=True)
class HostShard(Shard):
    """A shard whose optimizer part is on the host.

    updating: the update that reads `gradient` and writes `master`
    spare:    the other gradient buffer, which the next step fills while the update reads `gradient`; or None
    reading:  the update that reads `spare`
    on:       the device on which the model runs
    kinds:    what the memory of master weights and gradients counts as
    """

    updating: Pending = DONE
    spare: Tensor | None = None
    reading: Pending = DONE
    kinds: tuple[str, str] = ("host", "host")
    on: torch.device = HOST
    norms: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def device(self) -> torch.device:
        return self.on

    def narrow(self) -> None:
        """New weights come up by themselves."""

    def settle(self) -> None:
        for pending in (self.updated, self.updating, self.reading):
            pending.wait()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        yield self.kinds[0], self.master
        for gradient in (self.gradient, self.spare):
            if gradient is not None:
                yield self.kinds[1], gradient


def are_masters(dtype: torch.dtype, *, in_memory: bool, delays: bool) -> bool:
    """Whether weights of `dtype` that are on the host are their own master weights: not where these are in files, nor
    where a late update runs while the weights are used."""
    return dtype == torch.float32 and in_memory and not delays


class HostHome:
    """The `Home` of shards that are offloaded. `memory`: where what lives over steps is kept."""

    def __init__(
        self,
        queues: Queues,
        staging: Staging,
        memory: Memory,
        device: torch.device,
        *,
        delays: bool,
        weights_here: bool,
    ) -> None:
        """`delays`: an update goes on while the next gradients come; `weights_here`: the model's weights are on the
        host too, and fp32 ones are their own master weights where no update runs while they are used."""
        self._weights_here = weights_here
        self._queues = queues
        self._staging = staging
        self._memory = memory
        self._device = device
        self._delays = delays
        self._coming: deque[Pending] = deque()

    def shard(self, bucket: Bucket, span: slice, initial: Tensor, weights: Tensor, held: torch.dtype) -> HostShard:
        numel = initial.numel()
        kept_in_memory = self._memory.kind == "host"
        same = self._weights_here and are_masters(weights.dtype, in_memory=kept_in_memory, delays=self._delays)
        return HostShard(
            bucket=bucket,
            span=span,
            master=weights if same else self._memory.keep(f"{bucket.label} master", initial.to(HOST, torch.float32)),
            gradient=fresh(numel, held, HOST),
            weights=weights,
            spare=fresh(numel, held, HOST) if self._delays else None,
            kinds=(self._memory.kind, "host"),
            on=self._device,
        )

    def make_room(self) -> None:
        while len(self._coming) > 1:
            self._coming.popleft().wait()

    def deliver(self, shard: Shard, gradient: Tensor, free: Callable[[], None], *, first: bool, final: bool) -> Pending:
        assert isinstance(shard, HostShard)
        if first and shard.spare is not None:
            shard.gradient, shard.spare = shard.spare, shard.gradient
            shard.updating, shard.reading = shard.reading, shard.updating
        into, reading = shard.gradient, shard.updating if first else DONE

        def bring() -> None:
            with self._staging.take(gradient.numel(), gradient.dtype) as landed:
                landed.copy_(gradient, non_blocking=True)
                settled(self._device)
                free()
                reading.wait()
                if first:
                    into.copy_(landed)
                else:
                    into.add_(landed)
            if final:
                shard.norms = group_norms(into)

        if len(self._coming) == UNDER_WAY:
            self._coming.popleft().wait()
        self._coming.append(self._queues.down.put(bring, shard.bucket.label))
        return self._coming[-1]

    def norms(self, shard: Shard) -> Tensor:
        assert isinstance(shard, HostShard)
        return shard.norms
