"""Clipping by the global gradient norm."""

from dataclasses import dataclass
from math import inf, sqrt


@dataclass(frozen=True)
class Clip:
    """The gradient's norm before clipping, what it is multiplied by, and the norm after."""

    norm: float
    coefficient: float

    @property
    def norm_after(self) -> float:
        return self.norm * self.coefficient


def clip(squares: float, divisor: float, limit: float) -> Clip:
    """For gradients that are held `divisor` times too large, with squares adding up to `squares`.

    `limit` 0 leaves them as they are. As in torch.nn.utils.clip_grad_norm_, the coefficient is
    limit / (norm + 1e-6) where that is below 1.
    """
    norm = sqrt(squares) / divisor if squares != inf else inf
    return Clip(norm, min(1.0, limit / (norm + 1e-6)) if limit else 1.0)
