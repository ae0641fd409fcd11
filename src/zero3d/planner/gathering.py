"""Windows of level 3, by going through forwards and backwards on paper: how often buckets are gathered, and the largest
number in use at once of each size, which is what the pool keeps. As `zero.use` and `zero.gathered` do it. Pure.
"""

from collections.abc import Collection, Hashable, Sequence

from zero3d.comm.bucket import Bucket
from zero3d.planner.keeping import DTYPES
from zero3d.planner.reducing import PaperPool


class PaperWindows:
    """keeps: what a forward gathers stays until the end of the step; stays: buckets of which all is kept here; shared:
    buckets of several units, which linger until another is taken."""

    def __init__(
        self, pool: PaperPool, prefetch: int, *, keeps: bool, stays: bool, shared: Collection[Bucket] = frozenset()
    ) -> None:
        self._pool = pool
        self._prefetch = prefetch
        self._keeps = keeps
        self._stays = stays
        self._shared = shared
        self._users: dict[Bucket, int] = {}
        self._lent: dict[Bucket, tuple[int, Hashable]] = {}
        self._kept: set[Bucket] = set()
        self._lingering: Bucket | None = None
        self.gathered: list[Bucket] = []

    def forward(self, blocks: Sequence[Sequence[Bucket]], outside: Sequence[Bucket]) -> None:
        """Of a stage with these blocks; others come to be gathered in no other way."""
        self._hold(outside)
        self._start([bucket for names in blocks[: self._prefetch] for bucket in names])
        self._use(outside)
        for at, mine in enumerate(blocks):
            self._take(mine)
            for names in blocks[at + 1 : at + 1 + self._prefetch]:
                self._start(names)
            if self._keeps:
                self._keep(mine)
            self._drop(mine)
        self._use(outside)
        if self._keeps:
            self._keep(outside)
        self._drop(outside)

    def backward(self, blocks: Sequence[Sequence[Bucket]], outside: Sequence[Bucket]) -> None:
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
        self.end_turn()

    def end_turn(self) -> None:
        self._linger(None)

    def _hold(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self._users[bucket] = self._users.get(bucket, 0) + 1
        self._start(buckets)

    def _take(self, buckets: Sequence[Bucket]) -> None:
        if self._lingering not in buckets:
            self._linger(None)
        self._hold(buckets)

    def _use(self, buckets: Sequence[Bucket]) -> None:
        """By units of which the whole forward holds all."""
        if buckets and self._lingering not in buckets:
            self._linger(None)

    def _keep(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket not in self._kept:
                self._kept.add(bucket)
                self._users[bucket] += 1

    def _start(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket not in self._lent:
                kind = (bucket.numel * DTYPES.get(bucket.dtype, 4), bucket.dtype)
                self._lent[bucket] = kind if self._stays else self._pool.take(*kind)
                self.gathered.append(bucket)

    def _drop(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self._users[bucket] -= 1
            if not self._users[bucket] and bucket in self._lent:
                if bucket in self._shared:
                    self._linger(bucket)
                else:
                    self._give(bucket)

    def _linger(self, bucket: Bucket | None) -> None:
        before, self._lingering = self._lingering, bucket
        if before is not None and before is not bucket and not self._users[before] and before in self._lent:
            self._give(before)

    def _give(self, bucket: Bucket) -> None:
        kind = self._lent.pop(bucket)
        if not self._stays:
            self._pool.give(kind)
