"""Exact sums: equal to the true sum, rounded once, in any order and however they are cut."""

import math
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero3d.exact import GROUP, exact_sum, group_norms, sum_of_squares, value_of

singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
norms = st.floats(min_value=0.0, max_value=2.0**130, allow_subnormal=False).filter(
    lambda norm: norm == 0 or norm > 1e-44
)


@settings(max_examples=60, deadline=None)
@given(st.lists(singles, min_size=1, max_size=50), st.randoms(use_true_random=False))
def test_equals_the_true_sum_rounded_once(values: list[float], shuffler) -> None:  # type: ignore[no-untyped-def]
    expected = float(sum(Fraction(value) for value in values))
    limbs = exact_sum(values)
    assert value_of(limbs) == expected
    shuffler.shuffle(values)
    cut = shuffler.randrange(len(values) + 1)
    parts = zip(exact_sum(values[:cut]), exact_sum(values[cut:]))
    assert value_of([one + other for one, other in parts]) == expected


def square(norm: float) -> Fraction:
    """As it is counted: rounded to 26 bits."""
    mantissa, exponent = math.frexp(norm)
    return round(mantissa * mantissa * 2**26) * Fraction(2) ** (2 * exponent - 26)


@settings(max_examples=60, deadline=None)
@given(st.lists(norms, min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_squares_add_up_exactly_in_any_order(values: list[float], shuffler) -> None:  # type: ignore[no-untyped-def]
    limbs = sum_of_squares(torch.tensor(values, dtype=torch.float64))
    assert value_of(limbs.tolist()) == float(sum(square(value) for value in values))
    shuffler.shuffle(values)
    cut = shuffler.randrange(len(values) + 1)
    parts = [sum_of_squares(torch.tensor(part, dtype=torch.float64)) for part in (values[:cut], values[cut:])]
    assert value_of((parts[0] + parts[1]).tolist()) == value_of(limbs.tolist())


def test_many_terms_do_not_overflow_a_limb() -> None:
    values = torch.full((1 << 20,), 1.0 - 2.0**-53, dtype=torch.float64)
    assert value_of(sum_of_squares(values).tolist()) == math.ldexp(1.0, 20)


def test_group_norms_do_not_depend_on_the_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = 10.0 ** torch.randint(-44, 30, (1000, 1), generator=generator).double()
    flat = (torch.randn(1000, GROUP, generator=generator) * scale).float().view(-1)
    whole = group_norms(flat)
    for cut in (1, 17, 500, 999):
        parts = torch.cat([group_norms(flat[: cut * GROUP]), group_norms(flat[cut * GROUP :])])
        assert torch.equal(parts, whole)


def test_group_norms_hold_over_the_range_of_fp32() -> None:
    for magnitude in (1e-20, 1e-13, 1e-6, 1.0, 1e6, 1e15, 1e30, 3e38):
        flat = torch.full((GROUP,), magnitude)
        expected = math.sqrt(GROUP) * float(flat[0])
        norm = group_norms(flat)
        assert math.isclose(float(norm[0]), expected, rel_tol=1e-6), magnitude
        assert math.isclose(value_of(sum_of_squares(norm).tolist()), expected**2, rel_tol=1e-6), magnitude
    assert float(group_norms(torch.zeros(GROUP))[0]) == 0.0
    broken = torch.ones(3 * GROUP)
    broken[GROUP] = math.nan
    broken[2 * GROUP] = math.inf
    assert torch.isfinite(group_norms(broken)).tolist() == [True, False, False]
