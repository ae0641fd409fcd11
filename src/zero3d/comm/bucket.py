"""Which parameters sit where in one padded flat buffer. Pure: no tensors.

    bucket   | slot 0 | slot 1      |  slot 2   | padding |
    shards   |    shard of rank 0   |   shard of rank 1   |

A bucket holds parameters of one dtype, all trainable or all frozen, of one unit (a block, or one of the modules
outside the blocks), at levels 0 and 1 also of several that follow each other. Slots and shards start at multiples
of ALIGN elements: an elementwise operation meets no ragged end, so a vectorised kernel gives the same bits wherever
the shards are cut.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

ALIGN = 64
"""Elements; a cache line of 1-byte elements, a whole number of vector registers of any dtype."""


def aligned(numel: int, step: int = ALIGN) -> int:
    """`numel` rounded up to a multiple of `step`."""
    return -(-numel // step) * step


@dataclass(frozen=True, kw_only=True)
class Want:
    """A parameter that asks for a place: `key` groups what may share a bucket (dtype, trainable)."""

    name: str
    numel: int
    itemsize: int
    key: tuple[str, bool]


@dataclass(frozen=True)
class Asking:
    """A unit that asks for places for all its parameters; `alone`: they share a bucket with no others."""

    name: str
    wants: Sequence[Want]
    alone: bool = False


@dataclass(frozen=True)
class Slot:
    """Elements [offset, offset + numel) of the bucket are the parameter `name`, flattened."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """The part of one parameter in a range of the bucket.

    Elements [start, stop) of the range hold elements [begin, begin + numel) of the flattened parameter;
    stop - start may exceed numel by padding.
    """

    name: str
    start: int
    stop: int
    begin: int
    numel: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """`numel` elements of `dtype` in `ranks` equal shards."""

    label: str
    dtype: str
    trainable: bool
    ranks: int
    slots: tuple[Slot, ...]

    @cached_property
    def numel(self) -> int:
        last = self.slots[-1]
        return aligned(last.offset + last.numel, ALIGN * self.ranks)

    @property
    def shard_numel(self) -> int:
        return self.numel // self.ranks

    @cached_property
    def make_up(self) -> tuple[tuple[int, int], ...]:
        """Where its slots are, and how large: buckets of one make-up have padding in the same places."""
        return tuple((slot.offset, slot.numel) for slot in self.slots)

    def shard(self, rank: int) -> slice:
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def pieces(self, span: slice) -> Iterator[Piece]:
        """What elements [span.start, span.stop) of the bucket hold, parameter by parameter.

        The pieces cover the whole range; the last is of the parameter "" where it is padding alone.
        """
        covered = span.start
        for slot in self.slots:
            start, stop = max(slot.offset, span.start), min(slot.offset + slot.numel, span.stop)
            if start < stop:
                covered = min(aligned(stop), span.stop)
                yield Piece(slot.name, start - span.start, covered - span.start, start - slot.offset, stop - start)
        if covered < span.stop:
            yield Piece("", covered - span.start, span.stop - span.start, 0, 0)


def quarter(total: float) -> float:
    """Of a model of `total` bytes: a bucket that small units may share where none is gathered by itself."""
    return total / 4


def sliver(total: float) -> float:
    """The same where each use, or each micro-batch, pays for what it shares a bucket with."""
    return min(total / 16, 1e6)


def plan_units(
    units: Sequence[Asking], ranks: int, limit: float, joined_bytes: Callable[[float], float]
) -> list[Bucket]:
    """Unit by unit; neighbouring small units share a bucket of up to `joined_bytes(bytes of the model)`, as fewer and
    larger reductions cost less, and most of them still overlap with the backward."""
    asking = [unit for unit in units if unit.wants]
    total = sum(_size(unit) for unit in asking)
    return [
        bucket
        for unit in _joined(asking, min(limit, joined_bytes(total)))
        for bucket in plan_buckets(unit.name, unit.wants, ranks, inf if unit.alone else limit)
    ]


def _joined(asking: Sequence[Asking], limit: float) -> list[Asking]:
    joined: list[Asking] = []
    size: float = 0
    for unit in asking:
        more: float = inf if unit.alone else _size(unit)
        if joined and size + more <= limit:
            first = joined.pop()
            joined.append(Asking(f"{first.name.partition(' to ')[0]} to {unit.name}", [*first.wants, *unit.wants]))
            size += more
        else:
            joined.append(unit)
            size = more
    return joined


def _size(unit: Asking) -> int:
    return sum(want.numel * want.itemsize for want in unit.wants)


def plan_buckets(name: str, wants: Iterable[Want], ranks: int, limit_bytes: float) -> list[Bucket]:
    """The buckets of what is called `name`: parameters in order, cut before the one that would pass `limit_bytes`.

    >>> want = lambda name, numel: Want(name=name, numel=numel, itemsize=4, key=("float32", True))
    >>> [bucket] = plan_buckets("h.0", [want("h.0.w", 100), want("h.0.b", 10)], ranks=2, limit_bytes=1e6)
    >>> bucket.slots
    (Slot(name='h.0.w', offset=0, numel=100), Slot(name='h.0.b', offset=128, numel=10))
    >>> bucket.numel, bucket.shard_numel
    (256, 128)
    """
    groups: dict[tuple[str, bool], list[list[Want]]] = {}
    sizes: dict[tuple[str, bool], int] = {}
    for want in wants:
        parts = groups.setdefault(want.key, [[]])
        size = aligned(want.numel) * want.itemsize
        if parts[-1] and sizes[want.key] + size > limit_bytes:
            parts.append([])
        sizes[want.key] = size + (sizes[want.key] if parts[-1] else 0)
        parts[-1].append(want)
    found = [(key, part) for key, parts in groups.items() for part in parts if any(want.numel for want in part)]
    return [
        Bucket(
            label=name if len(found) == 1 else f"{name}/{index}",
            dtype=key[0],
            trainable=key[1],
            ranks=ranks,
            slots=_slots(part),
        )
        for index, (key, part) in enumerate(found)
    ]


def _slots(wants: Sequence[Want]) -> tuple[Slot, ...]:
    slots, offset = [], 0
    for want in wants:
        slots.append(Slot(want.name, offset, want.numel))
        offset += aligned(want.numel)
    return tuple(slots)
