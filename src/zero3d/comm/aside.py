"""What ranks tell each other beside the numbers of a step, in the exchange that a step ends with anyway."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Aside:
    """`mine`: whole numbers of this rank for the next exchange, as many on each rank; `found`: the sums over all ranks
    of the exchange before, the same on every rank; empty where nobody had any."""

    mine: Sequence[int] = ()
    found: Sequence[int] = ()
