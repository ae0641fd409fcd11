"""Sums of floating-point numbers that come out the same in any order: exact, in integers.

A number is an integer times a power of two. Limb i of a sum counts multiples of 2**(32 i - BIAS); adding limbs is
adding integers, so neither the order of the terms, nor how they are cut over buckets and ranks, nor the order in
which ranks are added can change a bit. That is what makes the gradient norm, and with it clipping, the same at
every level and bucket size. (The idea is Kulisch's long accumulator.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

LIMBS = 22
BIAS = 320
"""2**-320 lies below the square of the smallest fp32 number; 22 limbs reach above the largest square."""
GROUP = 64
"""Elements whose squares are added in fp64 first: shards are never cut inside such a group."""
_LOW = (1 << 32) - 1
_BLOCK = 1 << 16


def exact_sum(values: Tensor) -> Tensor:
    """The limbs int64 [LIMBS] of the sum of `values` fp64 [n], all finite and of magnitude 2**-267 to 2**350 or 0."""
    mantissa, exponent = torch.frexp(values)
    whole = torch.ldexp(mantissa, torch.tensor(53)).to(torch.int64)
    place = (exponent.to(torch.int64) + (BIAS - 53)).clamp_(min=0)
    limbs = torch.zeros(LIMBS, dtype=torch.int64, device=values.device)
    for part, at in ((whole & ((1 << 27) - 1), place), (whole >> 27, place + 27)):
        shifted = part << (at & 31)
        limb = at >> 5
        limbs.index_add_(0, limb, shifted & _LOW)
        limbs.index_add_(0, limb + 1, shifted >> 32)
    return limbs


def group_squares(flat: Tensor) -> Tensor:
    """fp64 [n / 64]: the sum of squares of each group of 64 elements of `flat` [n]."""
    sums = torch.empty(flat.numel() // GROUP, dtype=torch.float64, device=flat.device)
    block = torch.empty(min(_BLOCK, flat.numel()), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _BLOCK):
        squares = block[: flat.numel() - start]
        squares.copy_(flat[start : start + _BLOCK])
        squares.mul_(squares)
        torch.sum(squares.view(-1, GROUP), dim=1, out=sums[start // GROUP : (start + _BLOCK) // GROUP])
    return sums


def value_of(limbs: Sequence[int]) -> float:
    """The sum as the nearest float; `inf` beyond the largest."""
    total = sum(limb << (32 * index) for index, limb in enumerate(limbs))
    try:
        return total / (1 << BIAS)
    except OverflowError:
        return float("inf")
