"""Exact sums: equal to the true sum, rounded once, in any order and however they are cut."""

import math
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero3d.exact import GROUP, exact_sum, group_squares, value_of

singles = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(singles, min_size=1, max_size=50), st.randoms(use_true_random=False))
def test_equals_the_true_sum_rounded_once(values: list[float], shuffler) -> None:  # type: ignore[no-untyped-def]
    expected = float(sum(Fraction(value) for value in values))
    limbs = exact_sum(torch.tensor(values, dtype=torch.float64))
    assert value_of(limbs.tolist()) == expected
    shuffler.shuffle(values)
    cut = shuffler.randrange(len(values) + 1)
    parts = [exact_sum(torch.tensor(part, dtype=torch.float64)) for part in (values[:cut], values[cut:])]
    assert torch.equal(parts[0] + parts[1], limbs) or value_of((parts[0] + parts[1]).tolist()) == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(singles.map(lambda value: value * value if abs(value) > 1e-15 else 0.0), min_size=1, max_size=40))
def test_squares_of_singles_are_in_range(values: list[float]) -> None:
    limbs = exact_sum(torch.tensor(values, dtype=torch.float64))
    assert value_of(limbs.tolist()) == float(sum(Fraction(value) for value in values))


def test_many_terms_do_not_overflow_a_limb() -> None:
    values = torch.full((1 << 20,), 1.0 - 2.0**-53, dtype=torch.float64)
    assert value_of(exact_sum(values).tolist()) == math.ldexp(1.0 - 2.0**-53, 20)


def test_group_sums_do_not_depend_on_the_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = 10.0 ** torch.randint(-44, 30, (1000, 1), generator=generator).double()
    flat = (torch.randn(1000, GROUP, generator=generator) * scale).float().view(-1)
    whole = group_squares(flat)
    for cut in (1, 17, 500, 999):
        parts = torch.cat([group_squares(flat[: cut * GROUP]), group_squares(flat[cut * GROUP :])])
        assert torch.equal(parts, whole)


def test_group_sums_hold_over_the_range_of_fp32() -> None:
    for magnitude in (1e-20, 1e-13, 1e-6, 1.0, 1e6, 1e15, 1e30, 3e38):
        flat = torch.full((GROUP,), magnitude)
        expected = GROUP * float(flat[0]) ** 2
        assert math.isclose(float(group_squares(flat)[0]), expected, rel_tol=1e-6), magnitude
    assert float(group_squares(torch.zeros(GROUP))[0]) == 0.0
    broken = torch.ones(3 * GROUP)
    broken[GROUP] = math.nan
    broken[2 * GROUP] = math.inf
    assert torch.isfinite(group_squares(broken)).tolist() == [True, False, False]
