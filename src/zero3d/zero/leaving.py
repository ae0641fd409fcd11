"""The way of a bucket's sums over ranks from the device to another home, micro-batch by micro-batch or once a step."""

from collections.abc import Callable

import torch
from torch import Tensor

from zero3d.comm.done import DONE
from zero3d.comm.flat import Pool
from zero3d.contracts import Home, Pending
from zero3d.zero.shard import Shard


class Leaving:
    """`dtype`: of what travels; the sum over ranks loses nothing in it that it does not lose when it is held."""

    def __init__(self, home: Home, shard: Shard, dtype: torch.dtype, pool: Pool) -> None:
        self.shard = shard
        self._home = home
        self._dtype = dtype
        self._pool = pool
        self._on_its_way: Pending = DONE

    def make_room(self) -> None:
        """Before another buffer is taken for gradients: no more than two are in use."""
        self._home.make_room()

    def place(self, collected: Tensor) -> Tensor:
        """Where the sum over ranks of `collected` is to land: that itself, where there is nothing to sum."""
        numel = self.shard.master.numel()
        if collected.numel() == numel and collected.dtype == self._dtype:
            return collected
        return self._pool.take(numel, self._dtype)

    def leave(self, landed: Tensor, free: Callable[[], None], *, first: bool, final: bool) -> None:
        self._on_its_way = self._home.deliver(self.shard, landed, free, first=first, final=final)

    def arrived(self) -> Tensor:
        """Waits for the last of it. -> norms of groups of the sum."""
        self._on_its_way.wait()
        return self._home.norms(self.shard)

    def give(self, landed: Tensor) -> None:
        self._pool.give(landed)
