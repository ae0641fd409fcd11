"""Sums of floating-point numbers that come out the same in any order: exact, in integers.

A number is an integer times a power of two. Limb i of a sum counts multiples of 2**(32 i - BIAS); adding limbs is
adding integers, so neither the order of the terms, nor how they are cut over buckets and ranks, nor the order in
which ranks are added can change a bit. That is what makes the gradient norm, and with it clipping, the same at
every level and bucket size. (The idea is Kulisch's long accumulator.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero3d.computed import is_fake

LIMBS = 24
BIAS = 384
"""2**-384 lies below the last bit of the square of the smallest fp32 number; 24 limbs reach above the largest."""
LARGEST = 2.0**300
"""Of what may be added up."""
GROUP = 64
"""Elements whose norm is taken in floating point: shards are never cut inside such a group."""
_LOW = (1 << 32) - 1
_EXPONENTS = range(-150, 160)
"""Of norms of groups of fp32 numbers, as torch.frexp gives them."""
_SAFE = (2.0**-40, 2.0**50)
"""Norms of groups whose squares fp32 can add without losing small ones or overflowing."""
_WIDENED = 1 << 16
"""Groups whose elements a GPU widens to fp64 at a time: 32 MiB."""


def exact_sum(values: Sequence[float]) -> list[int]:
    """The limbs of the sum of a few finite numbers below `LARGEST`."""
    total = 0
    for value in values:
        numerator, denominator = value.as_integer_ratio()
        total += (numerator << BIAS) // denominator
    top = LIMBS - 1
    return [(total >> (32 * index)) & _LOW for index in range(top)] + [total >> (32 * top)]


def sum_of_squares(norms: Tensor) -> Tensor:
    """The limbs int64 [LIMBS] of the sum of the squares, each rounded to 26 bits, of `norms` fp64 [n].

    Mantissas are added up by exponent, in fp64, whose sums of up to 2**27 such integers are exact; the few sums then
    become limbs. Of no meaning unless all norms are finite.
    """
    mantissa, exponent = torch.frexp(norms)
    squares = mantissa.square_().mul_(2.0**26).round_()
    at = (exponent - _EXPONENTS.start).clamp_(0, len(_EXPONENTS) - 1)
    sums = _by_exponent(at, squares)
    place = 2 * torch.arange(_EXPONENTS.start, _EXPONENTS.stop, device=norms.device) + (BIAS - 26)
    limbs = torch.zeros(LIMBS, dtype=torch.int64, device=norms.device)
    # A sum has up to 53 bits: below, three limbs of 32 bits take it after a shift of up to 31.
    for bits in (0, 27):
        piece = (sums >> 27 if bits else sums & ((1 << 27) - 1)) << (place + bits & 31)
        limb = place + bits >> 5
        limbs.index_add_(0, limb, piece & _LOW)
        limbs.index_add_(0, limb + 1, piece >> 32)
    return limbs


def _by_exponent(at: Tensor, squares: Tensor) -> Tensor:
    if is_fake(at):  # How many bins bincount makes would hang on values; this makes as much.
        made = torch.zeros(len(_EXPONENTS), dtype=squares.dtype, device=at.device)
        return made.index_add_(0, at, squares).to(torch.int64)
    if torch.are_deterministic_algorithms_enabled():
        # No order of these integers changes a bit, but torch refuses a GPU's bincount all the same.
        sums = torch.zeros(len(_EXPONENTS), dtype=torch.int64, device=at.device)
        return sums.index_add_(0, at.to(torch.int64), squares.to(torch.int64))
    return torch.bincount(at, weights=squares, minlength=len(_EXPONENTS)).to(torch.int64)


def group_norms(flat: Tensor) -> Tensor:
    """fp64 [n / 64]: the norm of each group of 64 elements of `flat` [n].

    In fp32; in fp64 where fp32's range is too small for the squares. A group whose squares all vanish in fp32
    (elements below 1e-23) counts as zero, as it does in torch's own norm.
    """
    groups = flat.view(-1, GROUP)
    fast = torch.linalg.vector_norm(groups, dim=1, dtype=torch.float32)
    norms: Tensor = fast.double()
    unsafe = (fast != fast.clamp(*_SAFE)) & (fast != 0)
    if flat.device.type != "cpu":
        return torch.where(unsafe, _wide_norms(groups), norms)
    if bool(unsafe.any()):
        few = unsafe.nonzero().view(-1)
        norms[few] = groups[few].double().square_().sum(dim=1).sqrt_()
    return norms


def _wide_norms(groups: Tensor) -> Tensor:
    """All in fp64: to find out whether any is needed, the host would wait for all that the device has to do."""
    return torch.cat([part.double().square_().sum(dim=1).sqrt_() for part in groups.split(_WIDENED)])


def value_of(limbs: Sequence[int]) -> float:
    """The sum as the nearest float; `inf` beyond the largest."""
    total = sum(limb << (32 * index) for index, limb in enumerate(limbs))
    try:
        return total / (1 << BIAS)
    except OverflowError:
        return float("inf")
