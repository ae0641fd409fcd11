"""An all-reduce of many elements over more than two ranks: sums in rank order, with the same bits on every rank, and
no more sent than a reduce-scatter and an all-gather need."""

from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.world import run_ranks
from zero3d.comm.lookout import Leg
from zero3d.comm.process_axis import LARGE, ProcessAxis
from zero3d.comm.wire import GroupWire


class Counting(GroupWire):
    """Counts the bytes that leave this rank."""

    sent = 0

    def leave(self, tensor: Tensor, to: int, tag: int) -> Leg:
        self.sent += tensor.nbytes
        return super().leave(tensor, to, tag)


def wire() -> Counting:
    group = dist.group.WORLD
    assert group is not None
    return Counting(group)


def of_rank(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul(10 ** (rank % 3)).to(dtype)


def in_order(size: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The sum by rank, in fp32, rounded once."""
    return reduce(torch.add, [of_rank(rank, numel, dtype).float() for rank in range(size)]).to(dtype)


def sums(dtype: torch.dtype) -> list[tuple[int, int]]:
    counting, found = wire(), []
    mine = ProcessAxis(counting, torch.device("cpu"))
    many = -(-LARGE // dtype.itemsize // 12) * 12
    for numel in (12, many - 12, many, 2 * many, many + 1):
        tensor, counting.sent = of_rank(mine.index, numel, dtype), 0
        mine.all_reduce(tensor, "sums").wait()
        assert torch.equal(tensor, in_order(mine.size, numel, dtype)), (numel, dtype)
        found.append((tensor.nbytes, counting.sent))
    return found


@pytest.mark.parametrize("ranks", [3, 4])
def test_sums_have_rank_order_and_many_elements_send_less(ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for found in run_ranks(ranks, sums, dtype):
            halves = [False, False, True, True, False]  # One element too many divides over no number of ranks.
            for (num_bytes, sent), in_halves in zip(found, halves, strict=True):
                assert sent == (2 * num_bytes * (ranks - 1) // ranks if in_halves else num_bytes * (ranks - 1))


def several_at_once() -> None:
    mine = ProcessAxis(wire(), torch.device("cpu"))
    numel = LARGE // 4 * 3
    tensors = [of_rank(mine.index + 10 * number, numel, torch.float32) for number in range(3)]
    pending = [mine.all_reduce(tensor, "one of several") for tensor in tensors]
    for one in pending:
        one.wait()
        one.wait()  # is nothing
    for number, tensor in enumerate(tensors):
        expected = reduce(torch.add, [of_rank(r + 10 * number, numel, torch.float32) for r in range(mine.size)])
        assert torch.equal(tensor, expected)


def test_several_of_one_label_are_under_way_at_once() -> None:
    run_ranks(3, several_at_once)
