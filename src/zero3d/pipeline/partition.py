"""Which blocks go to which stage. Pure.

Stages are runs of blocks that follow each other, so a partition of n blocks is where the cuts are. The slowest stage
sets the pace of all, so the best cuts make the longest stage as short as can be; among those, the largest stage as
small as can be; and among those, the stages as alike as can be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, inf
from operator import add

from zero3d.errors import ConfigError


@dataclass(frozen=True)
class Cost:
    """What a block, or what comes before or after the blocks, takes of its rank."""

    time: float = 0.0
    """Of forward and backward of one micro-batch, in any unit."""
    num_bytes: float = 0.0
    """Held at the peak of a step."""


@dataclass(frozen=True)
class Partition:
    """`blocks`: of each stage; `stages`: what each takes, with what comes before the first and after the last block."""

    blocks: Sequence[range]
    stages: Sequence[Cost]

    @property
    def longest(self) -> float:
        return max(stage.time for stage in self.stages)

    @property
    def largest(self) -> float:
        return max(stage.num_bytes for stage in self.stages)


def partition(
    blocks: Sequence[Cost],
    num_stages: int,
    *,
    before: Cost = Cost(),
    after: Cost = Cost(),
    most_bytes: float = inf,
) -> Partition:
    """The best cuts; `before` (an embedding) is the first stage's, `after` (a head and the loss) the last one's.

    Raises `ConfigError` for more stages than blocks, and where no partition keeps every stage within `most_bytes`.
    Takes O(stages * blocks^2) time.
    """
    _check_number(len(blocks), num_stages)
    table = _Table(blocks, num_stages, before, after)
    smallest = table.best(lambda stage: stage.num_bytes, lambda stage: True)
    if smallest.largest > most_bytes:
        raise ConfigError(
            f"no cut of {len(blocks)} blocks into {num_stages} stages keeps every stage within {most_bytes:,.0f} bytes",
            hint=f"The best has {smallest.largest:,.0f} bytes in its largest stage. More stages hold less each; so do "
            "smaller micro-batches, recompute, and a higher ZeRO level.",
        )
    longest = table.best(lambda stage: stage.time, lambda stage: stage.num_bytes <= most_bytes).longest
    largest = table.best(lambda stage: stage.num_bytes, lambda stage: stage.time <= longest).largest
    return table.best(
        lambda stage: stage.time**2,
        lambda stage: stage.time <= longest and stage.num_bytes <= largest,
        join=add,
    )


def by_hand(numbers: Sequence[int], num_blocks: int, num_stages: int) -> list[range]:
    """The blocks of each stage, from the number of them that the user gives each.

    Raises `ConfigError` where these are not `num_stages` numbers of at least 1 that add up to `num_blocks`.

    >>> by_hand([1, 2, 1], 4, 3)
    [range(0, 1), range(1, 3), range(3, 4)]
    """
    _check_number(num_blocks, num_stages)
    told = f"parallel.stage_blocks = {list(numbers)}"
    even, more = divmod(num_blocks, num_stages)
    hint = f"Such as {[even + (stage < more) for stage in range(num_stages)]}."
    if len(numbers) != num_stages:
        raise ConfigError(f"{told}: blocks of {len(numbers)} stages, and there are {num_stages}", hint=hint)
    if min(numbers) < 1:
        raise ConfigError(f"{told}: every stage needs at least one block", hint=hint)
    if sum(numbers) != num_blocks:
        raise ConfigError(f"{told}: {sum(numbers)} blocks, and the model has {num_blocks}", hint=hint)
    starts = [sum(numbers[:stage]) for stage in range(num_stages)]
    return [range(start, start + number) for start, number in zip(starts, numbers, strict=True)]


def _check_number(num_blocks: int, num_stages: int) -> None:
    if num_stages < 1:
        raise ConfigError(f"{num_stages} stages", hint="The number of stages must be at least 1.")
    if num_blocks < num_stages:
        raise ConfigError(
            f"{num_stages} stages need at least {num_stages} blocks, and the model has {num_blocks}",
            hint=f"Use at most {num_blocks} stages: a stage without a block has nothing to compute."
            if num_blocks
            else "A model without a list of repeated blocks cannot be cut.",
        )


class _Table:
    """What each stage would take, for every run of blocks that it could have."""

    def __init__(self, blocks: Sequence[Cost], num_stages: int, before: Cost, after: Cost) -> None:
        self._num_blocks, self._num_stages = len(blocks), num_stages
        self._blocks = [before, *blocks, after]
        self._known: dict[tuple[int, int], Cost] = {}

    def cost(self, start: int, end: int) -> Cost:
        """Of a stage with the blocks from `start` up to `end`."""
        if (start, end) not in self._known:
            # The same costs give the same sum to the last bit, wherever they stand: stages of equal blocks tie.
            mine = self._blocks[start + (start > 0) : end + 1 + (end == self._num_blocks)]
            sums = (fsum(block.time for block in mine), fsum(block.num_bytes for block in mine))
            self._known[start, end] = Cost(*sums)
        return self._known[start, end]

    def best(
        self,
        size: Callable[[Cost], float],
        allowed: Callable[[Cost], bool],
        join: Callable[[float, float], float] = max,
    ) -> Partition:
        """The partition of allowed stages whose `size`, joined over stages, is least. Where several are as good later
        stages get more blocks: earlier ones have more micro-batches live."""
        # best[end]: of the best cut of the first `end` blocks into the stages so far.
        best = [0.0, *[inf] * self._num_blocks]
        chosen: list[list[int]] = []
        for stage in range(self._num_stages):
            left = self._num_stages - 1 - stage
            row, starts = [inf] * (self._num_blocks + 1), [0] * (self._num_blocks + 1)
            for end in range(stage + 1, self._num_blocks - left + 1):
                for start in range(stage, end):
                    one = self.cost(start, end)
                    joined = join(best[start], size(one)) if allowed(one) else inf
                    if joined < row[end]:
                        row[end], starts[end] = joined, start
            best = row
            chosen.append(starts)
        return self._partition(chosen)

    def _partition(self, chosen: Sequence[Sequence[int]]) -> Partition:
        ends = [self._num_blocks]
        for starts in reversed(chosen):
            ends.insert(0, starts[ends[0]])
        blocks = [range(start, end) for start, end in pairwise(ends)]
        return Partition(blocks, [self.cost(one.start, one.stop) for one in blocks])
