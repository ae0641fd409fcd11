"""Windows of level 3, by going through a forward and a backward on paper: the largest number in use at once of each
size is what the pool keeps. As `zero.use` and `zero.gathered` do it. Pure.
"""

from collections.abc import Hashable, Sequence

from zero3d.comm.bucket import Bucket
from zero3d.planner.keeping import DTYPES
from zero3d.planner.reducing import PaperPool


class PaperWindows:
    """keeps: what a forward gathers stays until the end of the step; stays: buckets of which all is kept here."""

    def __init__(self, pool: PaperPool, prefetch: int, *, keeps: bool, stays: bool) -> None:
        self._pool = pool
        self._prefetch = prefetch
        self._keeps = keeps
        self._stays = stays
        self._users: dict[Bucket, int] = {}
        self._lent: dict[Bucket, tuple[int, Hashable]] = {}
        self._kept: set[Bucket] = set()

    def step(self, blocks: Sequence[Sequence[Bucket]], outside: Sequence[Bucket]) -> None:
        """A forward and a backward of a stage with these blocks; others come to be gathered in no other way."""
        self._take(outside)
        ahead = [bucket for names in blocks[: self._prefetch] for bucket in names]
        self._start(ahead)
        for at, mine in enumerate(blocks):
            self._take(mine)
            for names in blocks[at + 1 : at + 1 + self._prefetch]:
                self._start(names)
            if self._keeps:
                self._keep(mine)
            self._drop(mine)
        if self._keeps:
            self._keep(outside)
        self._drop(outside)
        self._take(outside)
        for at in reversed(range(len(blocks))):
            self._take(blocks[at])
            for names in blocks[max(at - self._prefetch, 0) : at][::-1]:
                self._start(names)
            if at + 1 < len(blocks):
                self._drop(blocks[at + 1])
        if blocks:
            self._drop(blocks[0])
        self._drop(outside)

    def _take(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self._users[bucket] = self._users.get(bucket, 0) + 1
        self._start(buckets)

    def _keep(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket not in self._kept:
                self._kept.add(bucket)
                self._users[bucket] += 1

    def _start(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket not in self._lent and not self._stays:
                self._lent[bucket] = self._pool.take(bucket.numel * DTYPES.get(bucket.dtype, 4), bucket.dtype)

    def _drop(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self._users[bucket] -= 1
            if not self._users[bucket] and bucket in self._lent:
                self._pool.give(self._lent.pop(bucket))
