"""Which elements go where between two ways of cutting a tensor: beside cutting numpy arrays."""

from collections.abc import Iterator
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero3d import slicing
from zero3d.checkpoint.slices import Part, Span, copies, number_of, part_of, share, whole
from zero3d.slicing import Slicing

Cuts = list[tuple[Part, np.ndarray, list[tuple[int, int]]]]
"""Of each rank: its part, the part's elements (0 in padding), and the spans that it is cut into."""


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6, 8, 12]), max_size=3)))


@st.composite
def slicings(draw: st.DrawFn, shape: tuple[int, ...]) -> Slicing | None:
    """One that fits, over 1 to 4 ranks."""
    if not shape or draw(st.booleans()):
        return None
    dim, ranks = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1, 2, 3, 4]))
    extent = shape[dim]
    kinds = [slicing.padded(extent, ranks, dim)]
    if extent % ranks == 0:
        kinds.append(slicing.even(extent, ranks, dim))
    if extent % (4 * ranks) == 0:
        kinds.append(slicing.fused((extent // 2, extent // 4, extent // 4), ranks, dim))
    if ranks == 4 and extent % 2 == 0:
        kinds.append(slicing.heads(extent, ranks, dim, unit=extent // 2))
    return draw(st.sampled_from(kinds))


@st.composite
def ways(draw: st.DrawFn, shape: tuple[int, ...]) -> Cuts:
    """A tensor of 1, 2, 3 ... over ranks of two axes; where several hold the same, the first alone."""
    tensor = np.arange(1, prod(shape) + 1).reshape(shape)
    cut = draw(slicings(shape))
    found: Cuts = []
    for index in range(1 if cut is None else len(cut.ranges)):
        if cut is not None and not cut.counts(index):
            continue
        part = part_of(shape, cut, index)
        values = tensor
        if cut is not None:
            values = np.concatenate([np.take(tensor, range(*one), cut.dim) for one in cut.ranges[index]], cut.dim)
            width = [(0, cut.padding[index] if dim == cut.dim else 0) for dim in range(len(shape))]
            values = np.pad(values, width)
        edges = sorted({0, part.numel, *draw(st.lists(st.integers(0, part.numel), max_size=3))})
        found.append((part, values.reshape(-1), list(pairwise(edges))))
    return found


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_element_goes_from_any_cut_into_any_other(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    saved, wanted = data.draw(ways(shape)), data.draw(ways(shape))
    for part, values, spans in wanted:
        for first, stop in spans:
            span = Span(part, first, stop - first)
            out = np.zeros(span.numel, dtype=int)
            times = np.zeros(span.numel, dtype=int)
            for source, elements, pieces in saved:
                for begin, end in pieces:
                    piece = elements[begin:end]
                    for at, to in moved(Span(source, begin, end - begin), span):
                        out[to] = piece[at]
                        times[to] += 1
            assert (out == values[first:stop]).all()
            assert (times <= 1).all() and (times[out > 0] == 1).all()
            assert number_of(span) == (values[first:stop] > 0).sum()


def moved(source: Span, target: Span) -> Iterator[tuple[int, int]]:
    for copy in copies(source, target):
        for row in range(copy.rows):
            for element in range(copy.length):
                yield copy.source + row * copy.source_step + element, copy.target + row * copy.target_step + element


def test_equal_rows_are_one_copy() -> None:
    """However many rows a matrix has that is cut by its columns."""
    halves = slicing.even(64, 2, dim=1)
    source, target = Span(whole((1000, 64)), 0, 64000), Span(part_of((1000, 64), halves, 1), 0, 32000)
    [copy] = copies(source, target)
    assert (copy.rows, copy.length, copy.source, copy.target) == (1000, 32, 32, 0)


@pytest.mark.parametrize("numel", [1, 63, 1024, 5000])
def test_those_that_hold_the_same_share_it(numel: int) -> None:
    parts = sorted(share(numel, 4, index, "name") for index in range(4))
    covered = [element for first, stop in parts for element in range(first, stop)]
    assert covered == list(range(numel))


def test_small_pieces_fall_on_all_ranks() -> None:
    writers = [next(index for index in range(4) if share(10, 4, index, f"w{number}")[1]) for number in range(200)]
    assert all(writers.count(index) > 25 for index in range(4))
