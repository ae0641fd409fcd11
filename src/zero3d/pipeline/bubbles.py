"""How long ranks are idle, by formula: what `simulate` finds for p equal stages, m micro-batches and no transfers.

Narayanan et al. 2021, section 2.2; Qi et al. 2023, section 2. F, I and W are the times of one micro-batch's forward and
of the two parts of its backward on a rank. Valid for any m with GPipe and 1F1B, for m >= p interleaved and with H1, for
m >= 2p - 1 with H2; H1 and H2 where W is no longer than F and than I.

>>> one_f_one_b(4, 8), interleaved(4, 8, chunks=2)
(0.375, 0.1875)
"""


def one_f_one_b(p: int, m: int) -> float:
    """Idle over ideal time of 1F1B, and of GPipe: (p - 1)/m."""
    return (p - 1) / m


def interleaved(p: int, m: int, *, chunks: int) -> float:
    """Idle over ideal time with `chunks` stages a rank: (p - 1)/(v m)."""
    return (p - 1) / (chunks * m)


def zbh1(p: int, *, forward: float, input_backward: float, weight_backward: float) -> float:
    """Idle time of ZB-H1: (p - 1)(F + I - W)."""
    return (p - 1) * (forward + input_backward - weight_backward)


def zbh2(p: int, *, forward: float, input_backward: float, weight_backward: float) -> float:
    """Idle time of ZB-H2 between a rank's own first start and last end: (p - 1)(F + I - 2 W)."""
    return (p - 1) * (forward + input_backward - 2 * weight_backward)


def rate(idle: float, ideal: float) -> float:
    """Idle over all time, which is what Qi et al. print: (cost - m (F + I + W))/cost."""
    return idle / (idle + ideal)
