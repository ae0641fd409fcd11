"""Which elements of a whole tensor a rank holds, and which of them another rank's file has. Pure.

    whole    [outer, extent, inner]    the middle is the dim that is cut over tensor-parallel ranks
    part     `ranges` of the middle, in order, then zeros: what one tensor-parallel rank has, flattened
    span     elements [begin, begin + numel) of a part: what one rank's shard has of it

A checkpoint's pieces are spans, and so is what a rank wants of it; `copies` says what goes where from one into the
other, however both are cut.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from zero3d.slicing import Range, Slicing

SMALL = 1024
"""Elements below which a piece that several ranks hold is not divided among them."""


@dataclass(frozen=True)
class Part:
    """What one tensor-parallel rank has of a tensor; ranges are in rising order."""

    outer: int
    extent: int
    inner: int
    ranges: tuple[Range, ...]
    padding: int = 0

    @cached_property
    def rows(self) -> int:
        """Of the middle one, zeros counted."""
        return sum(stop - start for start, stop in self.ranges) + self.padding

    @property
    def numel(self) -> int:
        return self.outer * self.rows * self.inner


@dataclass(frozen=True)
class Span:
    part: Part
    begin: int
    numel: int


class Run(NamedTuple):
    """`length` elements from `at` of the span are those from `whole` of the flattened whole tensor."""

    at: int
    whole: int
    length: int


class Copy(NamedTuple):
    """`rows` times `length` elements: the first from `source` of the one span to `target` of the other, the next ones
    a step further in each."""

    rows: int
    length: int
    source: int
    source_step: int
    target: int
    target_step: int


def whole(shape: Sequence[int]) -> Part:
    """All of a tensor."""
    numel = prod(shape)
    return Part(1, numel, 1, ((0, numel),))


def cut(shape: Sequence[int], dim: int, ranges: Sequence[Range], padding: int) -> Part:
    """`ranges` of dim `dim` of a tensor of shape `shape`."""
    return Part(prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :]), tuple(ranges), padding)


def part_of(shape: Sequence[int], slicing: Slicing | None, index: int) -> Part:
    """What tensor-parallel rank `index` has.

    >>> part_of((4, 6), Slicing(1, 6, (((0, 3),), ((3, 6),)), (0, 0)), 1)
    Part(outer=4, extent=6, inner=1, ranges=((3, 6),), padding=0)
    """
    if slicing is None:
        return whole(shape)
    return cut(shape, slicing.dim, slicing.ranges[index], slicing.padding[index])


def copies(source: Span, target: Span) -> Iterator[Copy]:
    """All that `target` wants and `source` has, in the order of the whole tensor. Padding comes from an equal part
    alone.

    >>> halves = [Part(2, 4, 1, ((0, 2),)), Part(2, 4, 1, ((2, 4),))]
    >>> list(copies(Span(halves[1], 0, 4), Span(whole((2, 4)), 0, 8)))
    [Copy(rows=2, length=2, source=0, source_step=2, target=2, target_step=4)]
    """
    if source.part == target.part:
        first = max(source.begin, target.begin)
        length = min(source.begin + source.numel, target.begin + target.numel) - first
        if length > 0:
            yield Copy(1, length, first - source.begin, 0, first - target.begin, 0)
        return
    bounds = _bounds(source), _bounds(target)
    low, high = max(one[0] for one in bounds), min(one[1] for one in bounds)
    if low < high:
        yield from _in_rows(_common(_runs(source, low, high), _runs(target, low, high)))


def number_of(span: Span) -> int:
    """Of the span's elements that are the tensor's and no padding."""
    return sum(run.length for run in _runs(span, 0, _end(span.part)))


def share(numel: int, holders: int, index: int, name: str) -> Range:
    """Of `numel` elements that `holders` ranks hold alike, those that the one with number `index` writes: an equal
    share, or of a small piece all or nothing, as `name` falls.

    >>> [share(4096, 3, index, "w") for index in range(3)]
    [(0, 1365), (1365, 2730), (2730, 4096)]
    """
    if numel >= SMALL:
        return numel * index // holders, numel * (index + 1) // holders
    return (0, numel) if zlib.crc32(name.encode()) % holders == index else (0, 0)


def _end(part: Part) -> int:
    return part.outer * part.extent * part.inner


def _bounds(span: Span) -> Range:
    """Between which elements of the whole tensor the span lies: roughly, in whole rows of `outer`."""
    row = span.part.rows * span.part.inner
    if not row or not span.numel or not span.part.ranges:
        return 0, 0
    step, first, last = span.part.extent * span.part.inner, span.begin // row, (span.begin + span.numel - 1) // row
    if first == last:  # One row, such as of what is cut by its first dim: its ranges say more.
        runs = list(_runs(span, 0, _end(span.part)))
        return (runs[0].whole, runs[-1].whole + runs[-1].length) if runs else (0, 0)
    return first * step, (last + 1) * step


def _runs(span: Span, low: int, high: int) -> Iterator[Run]:
    """The span's runs that meet elements [low, high) of the whole tensor, in order."""
    part = span.part
    row, step = part.rows * part.inner, part.extent * part.inner
    if not row or not step:
        return
    stop = span.begin + span.numel
    for outer in range(max(span.begin // row, low // step), min(-(-stop // row), -(-high // step))):
        at = outer * row
        for first, last in part.ranges:
            length = (last - first) * part.inner
            start, end = max(at, span.begin), min(at + length, stop)
            if start < end:
                yield Run(start - span.begin, outer * step + first * part.inner + start - at, end - start)
            at += length


def _common(sources: Iterator[Run], targets: Iterator[Run]) -> Iterator[Copy]:
    source, target = next(sources, None), next(targets, None)
    while source is not None and target is not None:
        first = max(source.whole, target.whole)
        ends = source.whole + source.length, target.whole + target.length
        if first < min(ends):
            found = source.at + first - source.whole, target.at + first - target.whole
            yield Copy(1, min(ends) - first, found[0], 0, found[1], 0)
        if ends[0] <= ends[1]:
            source = next(sources, None)
        else:
            target = next(targets, None)


def _in_rows(found: Iterator[Copy]) -> Iterator[Copy]:
    """The same, those of equal length and steps as one."""
    last: Copy | None = None
    for one in found:
        if last is not None and one.length == last.length:
            steps = one.source - last.source, one.target - last.target
            steps = steps[0] - (last.rows - 1) * last.source_step, steps[1] - (last.rows - 1) * last.target_step
            if last.rows == 1 or steps == (last.source_step, last.target_step):
                last = last._replace(rows=last.rows + 1, source_step=steps[0], target_step=steps[1])
                continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last
