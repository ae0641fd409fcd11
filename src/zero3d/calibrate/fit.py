"""From measured curves to the few numbers of the planner's formulas. Pure."""

from collections.abc import Iterable, Sequence
from math import exp, log
from typing import NamedTuple

from zero3d.calibrate.measured import Message, Product

HALVES = [0.0, *(round(1.1**power, 3) for power in range(75))]
"""What is tried for `half`: up to some 1000 elements."""


class Rate(NamedTuple):
    """Products of dims m, n, k run at peak / ((1 + half/m) (1 + half/n) (1 + half/k)). peak: FLOP/s; error: the largest
    relative one of a product of some size."""

    peak: float
    half: float
    error: float


def products(found: Sequence[Product]) -> dict[str, Rate]:
    """By dtype: peak and `half` with the least sum of squared relative errors, where a product counts by what it reads
    and writes, as large ones take most of a step.

    >>> rate = lambda dim: 8e9 / (1 + 32 / dim) ** 3
    >>> fitted = products([Product(dtype="fp32", m=dim, n=dim, k=dim, flops=rate(dim)) for dim in (64, 256, 1024)])
    >>> 30 < fitted["fp32"].half < 35, round(fitted["fp32"].peak / 1e9)
    (True, 8)
    """
    rates: dict[str, Rate] = {}
    for dtype in dict.fromkeys(one.dtype for one in found):
        mine = [one for one in found if one.dtype == dtype]
        tried = [_with_half(mine, half) for half in HALVES]
        rates[dtype] = min(tried, key=lambda one: one[0])[1]
    return rates


def _with_half(found: Sequence[Product], half: float) -> tuple[float, Rate]:
    """(the sum of errors, the best peak with this `half`)."""
    logs = [log(one.flops) + _lost(one, half) for one in found]
    weights = [(one.m * one.n * one.k) ** (2 / 3) for one in found]
    peak = sum(weight * value for weight, value in zip(weights, logs, strict=True)) / sum(weights)
    offs = [value - peak for value in logs]
    summed = sum(weight * off**2 for weight, off in zip(weights, offs, strict=True)) / sum(weights)
    return summed, Rate(exp(peak), half, max(abs(exp(off) - 1) for off in offs))


def _lost(one: Product, half: float) -> float:
    """The logarithm of what a product's sizes cost."""
    return log((1 + half / one.m) * (1 + half / one.n) * (1 + half / one.k))


LARGE = 16
"""Calls of this part of the largest one, and more, tell the bandwidth."""


class Line(NamedTuple):
    """A call takes latency + sent / bandwidth: seconds, bytes/s."""

    latency: float
    bandwidth: float


def line(found: Iterable[Message]) -> Line | None:
    """Of calls of several sizes; None where nothing was measured. The latency is the shortest time that any call took,
    and the bandwidth what large calls show beyond it: an intercept would be what chance made of the large ones.

    >>> sizes = (0, 10**6, 10**7)
    >>> line([Message(verb="send", ranks=2, sent=sent, seconds=1e-4 + sent / 1e9) for sent in sizes])
    Line(latency=0.0001, bandwidth=1000000000.0)
    """
    points = [(one.sent, one.seconds) for one in found]
    if not points:
        return None
    latency = min(seconds for _, seconds in points)
    most = max(sent for sent, _ in points)
    large = [(sent, seconds) for sent, seconds in points if sent * LARGE >= most]
    # Least squares of relative errors.
    over = sum(sent * (seconds - latency) / seconds**2 for sent, seconds in large)
    under = sum((sent / seconds) ** 2 for sent, seconds in large)
    slope = over / under if over > 0 else latency / most
    return Line(latency, round(1 / slope, 3))
