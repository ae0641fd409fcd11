"""A stopwatch that all ranks use together."""

from collections.abc import Callable
from statistics import quantiles
from time import perf_counter

import torch

from zero3d.contracts import Axis

LEAST_SAMPLE = 2e-3
"""Seconds: what takes less is timed several times at once, as the clock and other programs would show."""
STRETCH, STRETCHES = 20e-3, 150
"""Seconds that ranks of a model compute between two calls that they wait in, and how often that is done."""
MOST_INNER, LEAST_SAMPLES, MOST_SAMPLES = 1000, 5, 100


class Bench:
    """Times work on every rank of `axis` at once. `seconds`: for each number, about."""

    def __init__(self, axis: Axis, device: torch.device, seconds: float) -> None:
        self._axis = axis
        self._device = device
        self._seconds = seconds
        self._all = torch.zeros(axis.size, dtype=torch.float64, device=device)
        self.spreads: list[float] = []

    @property
    def device(self) -> torch.device:
        return self._device

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call of `work`, which may wait for other ranks: the median of the slowest rank. Collective; every rank
        calls `work` as often."""
        self._run(work, 1)
        one = max(self.slowest(self._run(work, 1)), 1e-9)
        inner = _within(LEAST_SAMPLE / one, 1, MOST_INNER)
        count = _within(self._seconds / (one * inner), LEAST_SAMPLES, MOST_SAMPLES)
        self.slowest(0.0)  # All begin together.
        samples = [self._run(work, inner) / inner for _ in range(count)]
        low, middle, high = quantiles(samples, n=4, method="inclusive")
        self.spreads.append((high - low) / middle)
        return self.slowest(middle)

    def waits(self, work: Callable[[], object]) -> float:
        """Of the time that ranks need for `work`, `STRETCH` or more of it at once, what a small call after it makes
        them wait beyond its own time: all wait for the slowest, which is now this rank and now that. Collective."""
        if self._axis.size == 1:
            return 0.0
        call = self.seconds(lambda: self.slowest(0.0))
        one = max(self.slowest(self._run(work, 1)), 1e-9)
        inner = _within(STRETCH / one, 1, MOST_INNER)
        self.slowest(0.0)
        working = waiting = 0.0
        for _ in range(STRETCHES):
            working += self._run(work, inner)
            began = perf_counter()
            self.slowest(0.0)
            waiting += perf_counter() - began
        working, waiting = self._mean(working), self._mean(waiting) - STRETCHES * call
        return max(waiting, 0.0) / working

    def _mean(self, value: float) -> float:
        """Over ranks, the same on each."""
        self.slowest(value)
        return float(self._all.mean())

    def slowest(self, value: float) -> float:
        """The largest of all ranks' values, the same on each. Collective."""
        mine = torch.tensor([value], dtype=torch.float64, device=self._device)
        self._axis.all_gather(self._all, mine, "timings").wait()
        return float(self._all.max())

    def _run(self, work: Callable[[], object], times: int) -> float:
        self._settle()
        began = perf_counter()
        for _ in range(times):
            work()
        self._settle()
        return perf_counter() - began

    def _settle(self) -> None:
        """What was started on the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _within(value: float, least: int, most: int) -> int:
    return int(min(max(value, least), most))
