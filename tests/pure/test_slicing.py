"""Slicings: what ranks hold covers the whole, in order, in equal shapes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero3d.slicing import Slicing, UnevenError, even, fused, grouped, heads, padded

RANKS = st.integers(1, 9)
DIMS = st.integers(0, 2)
SMALL = st.integers(1, 6)


def elements(slicing: Slicing, index: int) -> list[int]:
    return [one for start, stop in slicing.ranges[index] for one in range(start, stop)]


def assert_sound(slicing: Slicing, ranks: int) -> None:
    """Every rank holds as many elements, each in order; over those that count every element is there once."""
    assert len(slicing.ranges) == len(slicing.padding) == ranks
    for index in range(ranks):
        mine = elements(slicing, index)
        assert mine == sorted(set(mine))
        assert len(mine) + slicing.padding[index] == slicing.local_extent
    counted = [index for index in range(ranks) if slicing.counts(index)]
    every = Counter(one for index in counted for one in elements(slicing, index))
    assert every == Counter(range(slicing.extent))
    for index in range(ranks):
        holders = slicing.holders(index)
        assert index in holders and len(holders) == slicing.copies
        assert [slicing.counts(one) for one in holders] == [True] + [False] * (slicing.copies - 1)
        assert {tuple(elements(slicing, one)) for one in holders} == {tuple(elements(slicing, index))}


def assert_shapes_turn_back(slicing: Slicing) -> None:
    whole = tuple(slicing.extent if dim == slicing.dim else 7 + dim for dim in range(3))
    local = slicing.local_shape(whole)
    assert local[slicing.dim] == slicing.local_extent
    assert [size for dim, size in enumerate(local) if dim != slicing.dim] == [
        size for dim, size in enumerate(whole) if dim != slicing.dim
    ]
    assert slicing.whole_shape(local) == whole


@given(share=SMALL, unit=SMALL, ranks=RANKS, dim=DIMS)
def test_even_parts_follow_each_other_in_whole_units(share: int, unit: int, ranks: int, dim: int) -> None:
    slicing = even(share * unit * ranks, ranks, dim, unit)
    assert_sound(slicing, ranks)
    assert_shapes_turn_back(slicing)
    assert [one for index in range(ranks) for one in elements(slicing, index)] == list(range(slicing.extent))
    assert not any(start % unit or stop % unit for ranges in slicing.ranges for start, stop in ranges)
    assert slicing.copies == 1 and not any(slicing.padding)


@given(shares=st.lists(SMALL, min_size=1, max_size=4), unit=SMALL, ranks=RANKS, dim=DIMS)
def test_of_fused_projections_each_rank_has_an_equal_part_of_every_one(
    shares: list[int], unit: int, ranks: int, dim: int
) -> None:
    extents = [share * unit * ranks for share in shares]
    slicing = fused(extents, ranks, dim, unit)
    assert_sound(slicing, ranks)
    assert_shapes_turn_back(slicing)
    for index in range(ranks):
        lengths = [stop - start for start, stop in slicing.ranges[index]]
        assert lengths == [share * unit for share in shares]


@given(extent=st.integers(1, 50), ranks=RANKS, dim=DIMS)
def test_padding_fills_the_end_alone(extent: int, ranks: int, dim: int) -> None:
    slicing = padded(extent, ranks, dim)
    assert_sound(slicing, ranks)
    assert_shapes_turn_back(slicing)
    assert 0 <= sum(slicing.padding) == slicing.local_extent * ranks - extent
    assert slicing.local_extent - 1 < extent / ranks <= slicing.local_extent
    # Local element i of rank r is whole element r * local_extent + i: what an embedding and a loss count on.
    for index in range(ranks):
        first = index * slicing.local_extent
        mine = elements(slicing, index)
        assert mine == list(range(first, first + len(mine)))


@given(number=SMALL, copies=SMALL, unit=SMALL, dim=DIMS)
def test_heads_fewer_than_ranks_are_held_by_neighbours(number: int, copies: int, unit: int, dim: int) -> None:
    slicing = heads(number * unit, number * copies, dim, unit)
    assert_sound(slicing, number * copies)
    assert_shapes_turn_back(slicing)
    assert slicing.copies == copies and slicing.local_extent == unit


@given(share=SMALL, ranks=RANKS, unit=SMALL, dim=DIMS)
def test_heads_that_suffice_are_cut_as_others(share: int, ranks: int, unit: int, dim: int) -> None:
    assert heads(share * ranks * unit, ranks, dim, unit) == even(share * ranks * unit, ranks, dim, unit)


@given(of_kv=SMALL, group=SMALL, width=SMALL, ranks=RANKS, dim=DIMS)
def test_grouped_heads_stay_with_their_kv_head(of_kv: int, group: int, width: int, ranks: int, dim: int) -> None:
    of_kv *= ranks
    slicing = grouped(of_kv * group, of_kv, width, ranks, dim)
    assert_sound(slicing, ranks)
    assert slicing.extent == (of_kv * group + 2 * of_kv) * width
    for (q, _), (k, _), (v, _) in slicing.ranges:
        head, kv_head = q // width, k // width - of_kv * group
        assert (q % width, k % width) == (0, 0)
        assert head // group == kv_head
        assert v - k == of_kv * width


@given(extent=st.integers(1, 40), unit=SMALL, ranks=RANKS, repeat=st.booleans())
def test_what_is_not_sound_is_refused(extent: int, unit: int, ranks: int, repeat: bool) -> None:
    """Each case is either sound, or refused with a text that has the number in the way."""
    units = extent // unit
    fits = extent % unit == 0 and (units % ranks == 0 or (repeat and units < ranks and ranks % units == 0))
    cut = heads if repeat else even
    if fits:
        assert_sound(cut(extent, ranks, 0, unit), ranks)
        return
    with pytest.raises(UnevenError) as caught:
        cut(extent, ranks, 0, unit)
    assert str(extent) in str(caught.value) or str(units) in str(caught.value)


def test_fused_projections_cannot_repeat_kv_heads() -> None:
    with pytest.raises(UnevenError, match="2 KV heads fused with 4 heads on 4 ranks"):
        grouped(4, 2, 8, 4, 0)
    with pytest.raises(UnevenError, match="6 heads of 8 do not divide over 4 ranks"):
        grouped(6, 6, 8, 4, 0)


def test_texts_show_ranges_rank_by_rank() -> None:
    assert str(even(8, 2, 0)) == "0:4 | 4:8"
    assert str(fused((4, 2, 2), 2, 0)) == "0:2 4:5 6:7 | 2:4 5:6 7:8"
    assert str(padded(61, 4, 0)) == "0:16 | 16:32 | 32:48 | 48:61 +3"
    assert str(heads(16, 4, 0, unit=8)) == "0:8 | 0:8 | 8:16 | 8:16"
