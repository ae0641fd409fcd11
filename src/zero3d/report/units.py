"""How times look on the page. Pure."""

import math


def duration(seconds: float) -> str:
    """
    >>> duration(0.0123), duration(3.5), duration(7384)
    ('12.3 ms', '3.50 s', '2 h 03 min')
    """
    if not math.isfinite(seconds):
        return "not known"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
