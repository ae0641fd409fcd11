"""The computed order: a bijection, different for each seed and epoch, the same for ever."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zero3d.data.permutation import shuffled


@settings(deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
@example(n=1, seed=0, epoch=0)
@example(n=2, seed=0, epoch=0)
@example(n=3, seed=0, epoch=0)
@example(n=1025, seed=0, epoch=0)
def test_every_place_is_taken_once(n: int, seed: int, epoch: int) -> None:
    places = shuffled(np.arange(n), n, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(places), np.arange(n))


@settings(deadline=None, max_examples=30)
@given(n=st.integers(10, 10**15), data=st.data())
def test_a_position_alone_goes_where_it_goes_among_others(n: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    together = shuffled(positions, n, seed=1, epoch=2)
    assert len(set(together.tolist())) == len(positions) and all(0 <= place < n for place in together)
    for position, place in zip(positions, together, strict=True):
        assert shuffled([position], n, seed=1, epoch=2)[0] == place


def test_no_positions_no_places() -> None:
    assert shuffled([], 5, seed=0, epoch=0).tolist() == []


def test_seed_and_epoch_each_change_the_order() -> None:
    orders = {tuple(shuffled(range(50), 50, seed=s, epoch=e).tolist()) for s in range(5) for e in range(5)}
    assert len(orders) == 25


def test_the_order_is_random() -> None:
    """Over many epochs every position comes to every place about as often: chi-square of 15 x 15 cells."""
    n, epochs = 15, 1500
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), shuffled(np.arange(n), n, seed=7, epoch=epoch)] += 1
    expected = epochs / n
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 270  # (n - 1)^2 = 196 degrees of freedom, 3.7 standard deviations


def test_neighbours_are_parted() -> None:
    """Windows of one document should not meet in one batch."""
    places = shuffled(np.arange(10_000), 10_000, seed=0, epoch=0)
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(np.arange(10_000), places)[0, 1]) < 0.05


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run goes on in the order in which it began; these numbers must stay."""
    assert shuffled(range(10), 10, seed=0, epoch=0).tolist() == [9, 5, 6, 2, 0, 8, 3, 7, 1, 4]
    large = shuffled(range(3), 10**12, seed=5, epoch=3)
    assert large.tolist() == [493422490005, 6725574213, 204594549476]
