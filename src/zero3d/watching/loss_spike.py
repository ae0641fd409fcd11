"""A loss far above those before it. Pure.

Median and median absolute deviation of a window: neither one bad batch nor the slope of a loss that falls moves them
far. 1.4826 deviations are the standard deviation where values are normal (Rousseeuw and Croux 1993, section 1).
"""

import math
from collections import deque
from statistics import median

WINDOW, FEWEST = 64, 16
"""Losses that are looked back at; with fewer nothing is said."""
SIGMAS = 6.0
LEAST = 0.05
"""A jump of less than this part of the loss is none, however quiet it was before."""


class LossSpike:
    """Told of each step's loss, says once when a spike begins."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._within = False

    def look(self, loss: float) -> str:
        """What to say; empty: nothing. A loss that is not finite is another matter, and left out."""
        if not math.isfinite(loss):
            return ""
        middle = median(self._losses) if self._losses else loss
        spread = 1.4826 * median(abs(one - middle) for one in self._losses) if self._losses else 0.0
        above = loss - middle > max(SIGMAS * spread, LEAST * abs(middle))
        told = ""
        if len(self._losses) >= FEWEST:
            if above and not self._within:
                told = f"the loss has jumped to {loss:.4g}; the median of {len(self._losses)} steps is {middle:.4g}"
            self._within = above
        # What lasts for half of the window is no spike any more.
        self._losses.append(loss)
        return told
