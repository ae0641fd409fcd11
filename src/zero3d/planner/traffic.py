"""What a rank sends in a step, in the papers' terms: elements over dp, tp and pp, and bytes to and from the host.

    dp, per step                                            (ZeRO, section 7; N ranks, Psi parameters, M micro-batches)
        gradients once a step, level 0, 1, 2                2 Psi (N-1)/N
        gradients once a micro-batch, level 1, 2            (M + 1) Psi (N-1)/N
        level 3                                             3 M Psi (N-1)/N
    tp, per block and micro-batch                           (Narayanan et al. 2021, section 3.2)
        forward and backward, 4 all-reduces                 8 s b h (t-1)/t
        and computed again, 6 of them                       12 s b h (t-1)/t
        inputs kept in parts (ZeRO's P_a, section 8)        s b h (t-1)/t more
    pp, per boundary of stages and micro-batch              2 s b h: activations there and gradients back
    host, per step                                          (ZeRO-Offload, section 3)
        optimizer                                           g M Psi/N bytes down, w Psi/N up
        and weights                                         w Psi/N up in each forward and backward

An all-reduce is a reduce-scatter and an all-gather, with sequence parallel as without. `reduction.step_bytes` has the
bytes of a configuration of zero3d.

>>> [dp_elements(1, level, dp=float("inf")) for level in range(4)]
[2.0, 2.0, 2.0, 3.0]
"""

from dataclasses import dataclass
from typing import Literal

from zero3d.planner.activations import Recompute, Shape

L2L = 7
"""How often L2L moves what ZeRO-Offload moves once (ZeRO-Offload, section 6.2.2): it brings each layer's states to the
device and back."""


def _others(ranks: float) -> float:
    """(N-1)/N: the part that is not a rank's own."""
    return 1 - 1 / ranks


def dp_elements(
    parameters: float,
    level: int,
    *,
    dp: float,
    micro_batches: int = 1,
    reduce: Literal["step", "micro-batch"] | None = None,
) -> float:
    """Elements that a rank sends over dp in a step; `dp` may be infinite. `reduce`: left out, once a step at levels 0
    and 1, once a micro-batch above, as `zero.reduce`."""
    reduce = reduce or ("step" if level <= 1 else "micro-batch")
    reductions = 1 if reduce == "step" else micro_batches
    gathers = 2 * micro_batches if level == 3 else 1
    return parameters * (reductions + gathers) * _others(dp)


def tp_elements(shape: Shape, *, tp: float, recompute: Recompute = "none", kept_in_parts: bool = False) -> float:
    """Elements that a rank sends over tp for one block and micro-batch; `tp` may be infinite."""
    all_reduces = 6 if recompute == "full" else 4
    return shape.elements * (2 * all_reduces + kept_in_parts) * _others(tp)


def pp_elements(shape: Shape) -> int:
    """Elements over one boundary of stages for one micro-batch: activations and their gradients."""
    return 2 * shape.elements


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """Bytes a step: from the device to the host, and back."""

    down: float
    up: float

    @property
    def total(self) -> float:
        return self.down + self.up


def host_bytes(
    parameters: float,
    *,
    dp: int = 1,
    micro_batches: int = 1,
    weights: int = 2,
    gradients: int = 2,
    offload: Literal["optimizer", "parameters"] = "optimizer",
) -> HostBytes:
    """What a rank moves with offload where gradients are reduced once a micro-batch. weights, gradients: bytes of one
    as it travels.

    >>> host_bytes(7.5e9, dp=64).total / 7.5e9 * 64
    4.0
    """
    lifts = 2 * micro_batches if offload == "parameters" else 1
    return HostBytes(down=gradients * micro_batches * parameters / dp, up=weights * lifts * parameters / dp)
