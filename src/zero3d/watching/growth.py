"""Memory of a rank that grows while it should not. Pure."""

from collections import deque
from statistics import median

WARM_UP, WINDOW = 20, 20
"""Steps in which memory may still come to be; steps whose median counts, as saves and evaluations come and go."""
PART, LEAST = 0.1, 64 << 20
"""Growth by this part, and by so many bytes, is said; and again when it has grown so much once more."""


class Growth:
    """One rank's."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._looks = 0
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._known: float | None = None
        self._first = 0.0

    def look(self, num_bytes: int) -> str:
        """`num_bytes`: what the rank has now, after a step. -> what to say; empty: nothing."""
        self._looks += 1
        if self._looks <= WARM_UP:
            return ""
        self._recent.append(num_bytes)
        if len(self._recent) < WINDOW:
            return ""
        now = median(self._recent)
        if self._known is None:
            self._known = self._first = now
        if now - self._known < max(PART * self._known, LEAST):
            return ""
        self._known = now
        return (
            f"memory of rank {self._rank} grows: {now / 1e6:,.0f} MB, and {self._first / 1e6:,.0f} MB after "
            f"{WARM_UP + WINDOW} steps; does something keep what each step makes?"
        )
