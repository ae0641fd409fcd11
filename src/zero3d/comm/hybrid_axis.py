"""dp in groups: ZeRO shards within each group, and every group holds the same shards.

    groups 2, dp 4      | within |
    group 0             |  0   1 |     shards 0 and 1 of every bucket
    group 1             |  2   3 |     the same shards once more
                           0-2 1-3     across: ranks that hold the same shard

Weights are gathered within the group alone, where ranks are close. Gradients are summed within the group first, and
then only the part that landed is summed over the groups: few bytes go far. Both sums are in fp32 and in rank order;
what travels across is fp32, as a rounded sum of a group would no longer be the sum.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from zero3d.comm.bucket import aligned
from zero3d.comm.done import DONE
from zero3d.comm.flat import Pool
from zero3d.contracts import Axis, Pending


class Chain:
    """Calls of which each starts when the one before is done."""

    def __init__(self, first: Pending, then: Sequence[Callable[[], Pending]]) -> None:
        self._current = first
        self._then = deque(then)

    def move_on(self) -> bool:
        """Waits for the call under way and starts the next one. -> whether there are more to start."""
        if self._then:
            self._current.wait()
            self._current = self._then.popleft()()
        return bool(self._then)

    def wait(self) -> None:
        while self.move_on():
            pass
        self._current.wait()


class HybridAxis:
    """An `Axis` of my group's ranks, whose sums and broadcasts reach `everyone` on dp.

    within: my group; across: the ranks of all groups that hold the same shard as I; everyone: all of dp
    """

    one_call_sums = False

    def __init__(self, within: Axis, across: Axis, everyone: Axis, device: torch.device) -> None:
        self.size = within.size
        self.index = within.index
        self.group = across.index
        self._within = within
        self._across = across
        self._everyone = everyone
        self._pool = Pool(device)
        self._flying: list[Chain] = []

    def held(self) -> Iterable[Tensor]:
        return [*self._within.held(), *self._across.held(), *self._everyone.held(), *self._pool]

    def all_gather(self, out: Tensor, part: Tensor, label: str) -> Pending:
        return self._within.all_gather(out, part, label)

    def reduce_scatter(self, out: Tensor, whole: Tensor, label: str, *, add: bool = False) -> Pending:
        """The sum over all of dp of my part of `whole`. What is on its way moves on by one call with each new
        reduction, so that calls within and across groups overlap, in the same order on every rank."""
        numel = out.numel()
        in_place = out.dtype == torch.float32 and not add and numel % self._across.size == 0
        total = out if in_place else self._pool.take(aligned(numel, self._across.size), torch.float32)

        def land() -> Pending:
            if add:
                out.add_(total[:numel])
            elif not in_place:
                out.copy_(total[:numel])
            if not in_place:
                self._pool.give(total)
            return DONE

        first = self._within.reduce_scatter(total[:numel], whole, label)
        self._flying = [chain for chain in self._flying if chain.move_on()]
        chain = Chain(first, [*self._sum_across(total, f"{label} across groups"), land])
        self._flying.append(chain)
        return chain

    def all_reduce(self, tensor: Tensor, label: str) -> Pending:
        return self._everyone.all_reduce(tensor, label)

    def broadcast(self, tensor: Tensor, root: int, label: str) -> Pending:
        """From rank `root` of the first group to all of dp."""
        return self._everyone.broadcast(tensor, root, label)

    def send(self, tensor: Tensor, to: int, label: str) -> Pending:
        return self._within.send(tensor, to, label)

    def recv(self, tensor: Tensor, source: int, label: str) -> Pending:
        return self._within.recv(tensor, source, label)

    def _sum_across(self, total: Tensor, label: str) -> list[Callable[[], Pending]]:
        """In place, the same bits in every group. Where one call is slower: each group sums a part for all."""
        if self._across.one_call_sums:
            return [lambda: self._across.all_reduce(total, label)]
        mine = total.view(self._across.size, -1)[self._across.index]
        return [
            lambda: self._across.reduce_scatter(mine, total, label),
            lambda: self._across.all_gather(total, mine, label),
        ]
