"""Cuts into stages, against all cuts there are."""

from itertools import combinations, pairwise
from math import fsum, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero3d.errors import ConfigError
from zero3d.pipeline.partition import Cost, by_hand, partition

COSTS = st.builds(Cost, st.sampled_from([0.1, 0.2, 0.3, 1.0, 2.5]), st.integers(0, 5).map(float))


def stages_of(blocks: list[Cost], cuts: tuple[int, ...], before: Cost, after: Cost) -> list[Cost]:
    """Written otherwise than partition.py: sums of slices of the list with both ends put in."""
    ends = [0, *cuts, len(blocks)]
    runs = [list(blocks[start:end]) for start, end in pairwise(ends)]
    runs[0].append(before)
    runs[-1].append(after)
    return [Cost(fsum(one.time for one in run), fsum(one.num_bytes for one in run)) for run in runs]


def brute_force(
    blocks: list[Cost], num_stages: int, before: Cost, after: Cost, most_bytes: float
) -> tuple[float, float, float] | None:
    """(longest, largest, sum of squared times) of the best of all cuts; None where none is within `most_bytes`."""
    every = [stages_of(blocks, cuts, before, after) for cuts in combinations(range(1, len(blocks)), num_stages - 1)]
    sizes = [
        (max(one.time for one in stages), max(one.num_bytes for one in stages), sum(one.time**2 for one in stages))
        for stages in every
    ]
    return min((size for size in sizes if size[1] <= most_bytes), default=None)


@given(
    blocks=st.lists(COSTS, min_size=1, max_size=9),
    num_stages=st.integers(1, 5),
    before=COSTS,
    after=COSTS,
    most_bytes=st.sampled_from([inf, 4.0, 8.0, 12.0]),
)
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_no_other_cuts_are_better(
    blocks: list[Cost], num_stages: int, before: Cost, after: Cost, most_bytes: float
) -> None:
    """Longest and largest exactly: equal costs tie to the last bit, so that memory decides. The sums of squares but for
    rounding, as they are added in two orders."""
    num_stages = min(num_stages, len(blocks))
    best = brute_force(blocks, num_stages, before, after, most_bytes)
    if best is None:
        with pytest.raises(ConfigError, match="keeps every stage within"):
            partition(blocks, num_stages, before=before, after=after, most_bytes=most_bytes)
        return
    found = partition(blocks, num_stages, before=before, after=after, most_bytes=most_bytes)
    assert (found.longest, found.largest) == best[:2]
    assert sum(one.time**2 for one in found.stages) == pytest.approx(best[2], rel=1e-12)
    assert [one for run in found.blocks for one in run] == list(range(len(blocks)))
    assert len(found.blocks) == num_stages and all(found.blocks)
    cuts = tuple(run.start for run in found.blocks[1:])
    assert list(found.stages) == stages_of(blocks, cuts, before, after)


def test_equal_blocks_are_dealt_out_evenly_and_a_head_takes_the_place_of_blocks() -> None:
    blocks = [Cost(1.0, 10.0)] * 8
    assert [len(run) for run in partition(blocks, 4).blocks] == [2, 2, 2, 2]
    assert [len(run) for run in partition(blocks, 4, after=Cost(1.5)).blocks] == [2, 2, 3, 1]
    assert [len(run) for run in partition(blocks[:7], 2, before=Cost(1.0)).blocks] == [3, 4]


def test_memory_decides_among_cuts_of_the_same_speed() -> None:
    """Two of four blocks must share in any case: those that are least together."""
    blocks = [Cost(1.0, size) for size in (5.0, 1.0, 8.0, 3.0)]
    assert [len(run) for run in partition(blocks, 3).blocks] == [2, 1, 1]


def test_a_limit_of_memory_may_cost_time() -> None:
    blocks = [Cost(1.0, 6.0), Cost(1.0, 6.0), Cost(1.0, 1.0), Cost(1.0, 1.0)]
    assert [len(run) for run in partition(blocks, 2).blocks] == [2, 2]
    assert [len(run) for run in partition(blocks, 2, most_bytes=10).blocks] == [1, 3]
    with pytest.raises(ConfigError) as error:
        partition(blocks, 2, most_bytes=7)
    assert "The best has 8 bytes" in error.value.hint


def test_a_hundred_blocks_are_cut_at_once() -> None:
    found = partition([Cost(1.0 + (number % 7) / 7) for number in range(126)], 16)
    assert found.longest < 1.1 * fsum(stage.time for stage in found.stages) / 16


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_more_stages_than_blocks(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"4 stages need at least 4 blocks, and the model has {num_blocks}"):
        partition([Cost(1.0)] * num_blocks, 4)
    with pytest.raises(ConfigError):
        partition([Cost(1.0)], 0)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([2, 2], "blocks of 2 stages, and there are 3"),
        ([3, 0, 2], "at least one block"),
        ([2, 2, 2], "6 blocks, and the model has 5"),
    ],
)
def test_stages_by_hand_are_checked(numbers: list[int], message: str) -> None:
    assert by_hand([3, 1, 1], 5, 3) == [range(3), range(3, 4), range(4, 5)]
    with pytest.raises(ConfigError, match=message) as error:
        by_hand(numbers, 5, 3)
    assert error.value.hint == "Such as [2, 2, 1]."
