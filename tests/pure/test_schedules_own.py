"""Schedules of the user's own, and numbers that a schedule cannot do: errors that name the place and the way out."""

import pytest

from zero3d.errors import ConfigError
from zero3d.pipeline import legal
from zero3d.pipeline.schedules import own
from zero3d.pipeline.schedules.registry import SCHEDULES, named

MINE = """
# 2 ranks, one stage each
F0 F1  B0 F2 B1 B2   # rank 0

F0 B0  F1 B1 F2 B2
"""


def test_a_text_is_a_schedule() -> None:
    mine = own.parse(MINE, "mine.txt")
    assert mine.actions(2, 2, 3) == named("1f1b").actions(2, 2, 3)
    assert (mine.num_stages, mine.num_micro_batches, mine.usual_ranks(2)) == (2, 3, 2)
    assert mine.placement(2, 2) == [[0], [1]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_is_read_again(name: str) -> None:
    per_rank, ranks = SCHEDULES[name].stages_per_rank or 3, SCHEDULES[name].most_ranks or 4
    actions = named(name).actions(per_rank * ranks, ranks, 5)
    mine = own.parse(own.as_text(actions), name)
    assert mine.actions(per_rank * ranks, ranks, 5) == actions
    assert mine.placement(per_rank * ranks, ranks) == named(name).placement(per_rank * ranks, ranks)


def test_whole_and_split_backwards_may_be_mixed_and_stages_uneven() -> None:
    mine = own.parse("F0.0 F1.0 F0.1 B0.1 B0.0 F1.1 I1.1 I1.0 W1.0 W1.1", "mine.txt")
    assert (mine.num_stages, mine.num_micro_batches) == (2, 2)
    uneven = own.parse("F0.0 F0.1 B0.1 B0.0\nF0.2 B0.2", "mine.txt")
    assert uneven.placement(3, 2) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("F0 B0\nF0 X0", "'X0' is no action (kinds are F, B, I, W)", "mine.txt, line 2, word 2"),
        ("# mine\n\nF0 B", "'B' is no action", "mine.txt, line 3, word 2"),
        ("F0 b0", "'b0' is no action (kinds are F, B, I, W)", "mine.txt, line 1, word 2"),
        ("F0, B0", "'F0,' is no action", "mine.txt, line 1, word 1"),
        ("F0.0 B0.0\nF0.1 B0", "B0 names no stage, other actions do", "mine.txt, line 2"),
        ("# nothing\n", "no actions in this schedule", "mine.txt"),
        ("F0 B0 F0", "F0.0 is there 2 times", "mine.txt"),
        ("F0 F1 B0", "B1.0 is missing", "mine.txt"),
        ("F0 I0", "W0.0 is missing", "mine.txt"),
        ("F0 B0 W0", "B0.0 is there, and W0.0, which is a part of it", "mine.txt"),
        ("B0 F0", "B0.0 comes before F0.0", "mine.txt"),
        ("F0 W0 I0", "W0.0 comes before I0.0", "mine.txt"),
        ("F0.0 B0.0\nF0.2 B0.2", "no rank holds stage 1 of 3", "mine.txt"),
        ("F0.0 B0.0 B0.1\nF0.1", "F0.1 is on rank 1, and rank 0 holds stage 1", "mine.txt"),
        ("F0 F1 B1 B0", "B1.0 comes before B0.0: gradients would be added in another order", "mine.txt"),
        ("F999999999.999999999 B0.0", "F0.0 is missing", "mine.txt"),
    ],
)
def test_errors_name_the_place(text: str, message: str, where: str) -> None:
    with pytest.raises(ConfigError) as error:
        own.parse(text, "mine.txt")
    assert error.value.message.endswith(message) and error.value.where == where and error.value.hint


def test_a_text_is_for_its_own_numbers() -> None:
    with pytest.raises(ConfigError) as error:
        own.parse(MINE, "mine.txt").actions(2, 2, 4)
    assert "mine.txt is not for 2 stages, 2 ranks and 4 micro-batches" in error.value.message
    assert "2 stages, 2 ranks and 3 micro-batches" in error.value.hint


def test_an_action_on_a_rank_that_does_not_hold_its_stage() -> None:
    with pytest.raises(ConfigError, match=r"F0\.1 is on rank 1, which does not hold stage 1"):
        legal.check(named("1f1b").actions(2, 2, 2), [[1, 0], [0]])


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "message", "hint"),
    [
        ("1f1b", 4, 2, "1f1b has 1 stage a rank", "2 stages on 2 ranks or 4 stages on 4 ranks"),
        ("1f1b", 4, 2, "4 stages on 2 ranks", "interleaved has 2 stages a rank"),
        ("zbv", 4, 4, "zbv has 2 stages a rank", "8 stages on 4 ranks or 4 stages on 2 ranks"),
        ("zbv", 5, 2, "5 stages on 2 ranks", "Use 4 stages on 2 ranks."),
        ("interleaved", 6, 4, "6 cannot be dealt out to 4 ranks", "Use 4 or 8 stages, or 1, 2, 3 or 6 ranks."),
        ("accumulate", 2, 2, "accumulate is for one rank, not 2", "gpipe, 1f1b"),
        ("gpipe", 0, 2, "0 stages", "at least 1"),
    ],
)
def test_numbers_that_do_not_work_come_with_some_that_do(
    name: str, stages: int, ranks: int, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        named(name).actions(stages, ranks, 4)
    assert message in error.value.message and hint in error.value.hint


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError) as error:
        named("1F1b1")
    assert error.value.hint.startswith("Did you mean 1f1b?")
