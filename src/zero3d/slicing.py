"""How a whole tensor is cut over tensor-parallel ranks. Pure.

A slicing says, for each rank, which ranges of one dim it holds, in order; zeros fill what is missing at its end.

    even(8, 2)              rank 0: 0-4          rank 1: 4-8
    fused((4, 2, 2), 2)     rank 0: 0-2 4-5 6-7  rank 1: 2-4 5-6 7-8      projections under each other, such as q, k, v
    padded(61, 4)           ranks 0 to 2: 16     rank 3: 48-61 and 3 zeros
    heads(16, 4, unit=8)    ranks 0, 1: 0-8      ranks 2, 3: 8-16         fewer heads than ranks: some hold the same
"""

from collections.abc import Sequence
from dataclasses import dataclass

Range = tuple[int, int]


class UnevenError(ValueError):
    """A dim cannot be cut over so many ranks; the text says what of it does not divide."""


@dataclass(frozen=True)
class Slicing:
    """`ranges[index]` of dim `dim`, which has `extent` elements in the whole tensor; `copies` ranks that follow each
    other hold the same ones."""

    dim: int
    extent: int
    ranges: tuple[tuple[Range, ...], ...]
    padding: tuple[int, ...]
    copies: int = 1

    @property
    def local_extent(self) -> int:
        """Elements of `dim` that every rank holds, zeros counted."""
        return sum(stop - start for start, stop in self.ranges[0]) + self.padding[0]

    def local_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Of a rank's part of a tensor of shape `whole`."""
        return tuple(self.local_extent if dim == self.dim else extent for dim, extent in enumerate(whole))

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Of the tensor of which a rank's part has shape `local`."""
        return tuple(self.extent if dim == self.dim else extent for dim, extent in enumerate(local))

    def counts(self, index: int) -> bool:
        """Whether rank `index` is the first to hold what it holds: over these ranks every element counts once."""
        return index % self.copies == 0

    def holders(self, index: int) -> range:
        """The ranks that hold the same as rank `index`."""
        first = index - index % self.copies
        return range(first, first + self.copies)

    def __str__(self) -> str:
        """Rank by rank: "0:16 | 16:32"."""
        return " | ".join(
            " ".join(f"{start}:{stop}" for start, stop in ranges) + (f" +{pad}" if pad else "")
            for ranges, pad in zip(self.ranges, self.padding)
        )


def even(extent: int, ranks: int, dim: int, unit: int = 1) -> Slicing:
    """Equal parts of whole units. Raises `UnevenError`."""
    return fused((extent,), ranks, dim, unit)


def fused(extents: Sequence[int], ranks: int, dim: int, unit: int = 1) -> Slicing:
    """An equal part of each of several tensors that lie one after the other in `dim`. Raises `UnevenError`."""
    return _of_tensors([_shares(extent, ranks, unit, repeat=False) for extent in extents], extents, dim, copies=1)


def heads(extent: int, ranks: int, dim: int, unit: int) -> Slicing:
    """Heads of `unit` rows; where they are fewer than ranks, several ranks hold the same one. Raises `UnevenError`."""
    shares = _shares(extent, ranks, unit, repeat=True)
    return _of_tensors([shares], [extent], dim, copies=max(1, ranks * unit // extent))


def grouped(heads: int, kv_heads: int, width: int, ranks: int, dim: int) -> Slicing:
    """Rows of q, k and v, one after the other, of grouped heads that are `width` wide. Raises `UnevenError`."""
    if kv_heads < ranks:
        # Of q every element is held once, of k and v several times: no single number of copies tells.
        raise UnevenError(f"{kv_heads} KV heads fused with {heads} heads on {ranks} ranks")
    return fused((heads * width, kv_heads * width, kv_heads * width), ranks, dim, width)


def padded(extent: int, ranks: int, dim: int) -> Slicing:
    """Equal parts, the last ones filled up with zeros."""
    size = -(-extent // ranks)
    bounds = [(min(index * size, extent), min((index + 1) * size, extent)) for index in range(ranks)]
    ranges = tuple(((start, stop),) for start, stop in bounds)
    return Slicing(dim, extent, ranges, tuple(size - (stop - start) for start, stop in bounds))


def _shares(extent: int, ranks: int, unit: int, *, repeat: bool) -> list[Range]:
    units, rest = divmod(extent, unit)
    if rest:
        raise UnevenError(f"{extent} rows are no multiple of {unit}")
    what = f"{units} heads of {unit}" if unit > 1 else f"{units} features"
    if repeat and units < ranks:
        if ranks % units:
            raise UnevenError(f"{what}, fewer than {ranks} ranks and no divisor of that")
        return [(index * units // ranks * unit, (index * units // ranks + 1) * unit) for index in range(ranks)]
    if units % ranks:
        raise UnevenError(f"{what} do not divide over {ranks} ranks")
    share = units // ranks * unit
    return [(index * share, (index + 1) * share) for index in range(ranks)]


def _of_tensors(shares: Sequence[Sequence[Range]], extents: Sequence[int], dim: int, copies: int) -> Slicing:
    starts = [sum(extents[:number]) for number in range(len(extents))]
    ranges = tuple(
        tuple((start + first, start + last) for start, (first, last) in zip(starts, of_rank))
        for of_rank in zip(*shares)
    )
    return Slicing(dim, sum(extents), ranges, (0,) * len(ranges), copies)
