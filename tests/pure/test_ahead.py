"""What is told ahead of reading: all of it once, in order, and never further ahead than agreed."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zero3d.checkpoint.ahead import AHEAD, Ahead

gaps_and_lengths = st.lists(st.tuples(st.integers(0, 1 << 23), st.integers(1, 1 << 25)), min_size=1, max_size=8)


@given(gaps_and_lengths, st.integers(1 << 18, 1 << 22))
def test_all_that_is_read_is_told_before_and_little_else(parts: list[tuple[int, int]], step: int) -> None:
    ranges, at = [], 0
    for gap, length in parts:
        ranges.append((at + gap, at + gap + length))
        at = ranges[-1][1]
    told: list[tuple[int, int]] = []
    ahead = Ahead(ranges, lambda start, length: told.append((start, start + length)))
    for start, stop in ranges:
        for offset in range(start, stop, step):
            ahead.reading(offset)
            assert all(end <= offset + AHEAD for _, end in told)
            covered = max((end for _, end in told), default=0)
            # What is not told yet is the last, smaller than what is worth a call.
            assert covered >= min(stop, offset + AHEAD - (1 << 22))
    assert told == sorted(told)
    assert all(one[1] <= other[0] for one, other in pairwise(told))
    wanted = sum(stop - start for start, stop in ranges)
    assert wanted <= sum(stop - start for start, stop in told) <= wanted + len(parts) * (1 << 16)


def test_nothing_expected_tells_nothing() -> None:
    Ahead((), lambda start, length: (_ for _ in ()).throw(AssertionError)).reading(0)
