"""What is noticed while a run goes on: once, and only where something is to be noticed."""

from random import Random

from zero3d.watching.growth import LEAST, WARM_UP, WINDOW, Growth
from zero3d.watching.loss_spike import LossSpike
from zero3d.watching.slow_rank import SlowRank


def test_a_loss_that_falls_and_is_noisy_is_no_spike() -> None:
    draw, spike = Random(1), LossSpike()
    assert not [told for step in range(500) if (told := spike.look(6 / (1 + step / 50) + draw.gauss(0, 0.05)))]


def test_a_spike_is_told_once_as_it_begins_and_the_next_one_again() -> None:
    draw, spike = Random(2), LossSpike()
    told = []
    for step in range(200):
        loss = 2.0 + draw.gauss(0, 0.02) + (1.5 if step in (100, 101, 102, 150) else 0.0)
        told.append(spike.look(loss))
    assert [step for step, text in enumerate(told) if text] == [100, 150]
    assert "jumped to 3.5" in told[100]


def test_a_loss_that_is_not_finite_or_comes_early_is_left_out() -> None:
    spike = LossSpike()
    assert not any(spike.look(loss) for loss in (2.0, 9.0, float("nan"), float("inf"), 2.0))


def test_a_rank_that_is_slow_for_long_is_told_once_until_it_is_not() -> None:
    draw, slow = Random(3), SlowRank([0, 1, 2, 3])
    told = []
    for step in range(1500):
        busy = [0.1 + draw.gauss(0, 0.002) for _ in range(4)]
        busy[2] *= 1.6 if 100 <= step < 200 or 300 <= step < 400 or step >= 1000 else 1.0
        busy[1] *= 3.0 if step in (10, 130) else 1.0  # A page is written: nothing of note.
        told += [(step, rank, text) for rank, text in slow.look(busy)]
    assert [rank for _, rank, _ in told] == [2, 2]
    assert 100 < told[0][0] < 150 and 1000 < told[1][0] < 1050, "and not each time that it comes back"
    assert told[0][2].startswith("rank 2 is slow: busy ")


def test_of_two_ranks_the_slower_one_is_named_and_a_rank_alone_is_never_slow() -> None:
    two, one = SlowRank([4, 5]), SlowRank([0])
    told = [rank for _ in range(100) for rank, _ in two.look([0, 0, 0, 0, 0.2, 0.1])]
    assert told == [4]
    assert not [1 for _ in range(100) for _ in one.look([0.5])]


def test_memory_that_grows_is_told_now_and_then_and_what_comes_and_goes_is_not() -> None:
    steady, growing = Growth(0), Growth(3)
    told = []
    for step in range(2000):
        assert not steady.look((1 << 30) + (step % 7 == 0) * (200 << 20))
        told += [text] if (text := growing.look((1 << 30) + step * (1 << 20))) else []
    assert 5 <= len(told) <= 15 and "rank 3" in told[0]


def test_memory_that_comes_in_the_warm_up_or_is_little_is_not_told() -> None:
    growth = Growth(0)
    assert not any(growth.look(step << 28) for step in range(WARM_UP))
    level = WARM_UP << 28
    assert not any(growth.look(level + step * LEAST // 400) for step in range(10 * WINDOW))
