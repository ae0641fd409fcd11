"""A rank that all others wait for. Pure.

Steps end together on all ranks, so their length shows nobody. What tells ranks apart is how long each was busy: its
time without its waits for others. Ranks are compared with those of the same stages alone, as stages differ.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

WINDOW = 50
"""Steps whose median counts: once a page is written, or a batch is longer, nobody is slow."""
SLOWER, AGAIN = 1.4, 1.2
"""Busy so many times as long as the others is slow; below the second number a rank is slow no more."""
LEAST = 0.002
"""Seconds; less is noise."""
REST = 500
"""Steps in which a rank that was told of is not told of again, as on a machine that others use it comes and goes."""


class SlowRank:
    """`peers`: ranks that do the same work. Says once that one of them is slow, until it is not."""

    def __init__(self, peers: Sequence[int]) -> None:
        self._peers = peers
        self._busy = {rank: deque[float](maxlen=WINDOW) for rank in peers}
        self._slow: set[int] = set()
        self._rests: dict[int, int] = {}
        self._steps = 0

    def look(self, busy: Sequence[float]) -> list[tuple[int, str]]:
        """`busy`: seconds of one step by rank. -> (rank, what to say)."""
        self._steps += 1
        for rank in self._peers:
            self._busy[rank].append(busy[rank])
        if len(self._peers) < 2 or any(len(one) < WINDOW for one in self._busy.values()):
            return []
        usual = {rank: median(one) for rank, one in self._busy.items()}
        told = []
        for rank in self._peers:
            others = median(usual[other] for other in self._peers if other != rank)
            if usual[rank] > SLOWER * others and usual[rank] - others > LEAST and rank not in self._slow:
                self._slow.add(rank)
                if self._steps >= self._rests.get(rank, 0):
                    self._rests[rank] = self._steps + REST
                    told.append((rank, _told(rank, usual[rank], others)))
            elif usual[rank] < AGAIN * others:
                self._slow.discard(rank)
        return told


def _told(rank: int, mine: float, others: float) -> str:
    return (
        f"rank {rank} is slow: busy {mine * 1e3:.3g} ms a step, where the others are {others * 1e3:.3g} ms; "
        f"they wait for it"
    )
