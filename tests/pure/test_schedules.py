"""Schedules: drawn in files, and legal for any numbers. Pure."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero3d.pipeline import legal
from zero3d.pipeline.action import Action, Kind
from zero3d.pipeline.schedules import own
from zero3d.pipeline.schedules.registry import SCHEDULES, named
from zero3d.pipeline.simulate import peak_live, simulate

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*-*-*-*.txt"))
PER_RANK = {"interleaved": st.integers(1, 5), "zbv": st.just(2)}
"""Stages a rank; one for all others."""


def of_file(path: Path) -> tuple[str, int, int, int]:
    """A golden file is called NAME-STAGES-RANKS-MICRO_BATCHES.txt."""
    name, *numbers = path.stem.split("-")
    stages, ranks, micro_batches = map(int, numbers)
    return name, stages, ranks, micro_batches


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_schedules_are_those_of_the_files(path: Path) -> None:
    """One line a rank, to be read and checked by eye; whoever changes a schedule changes its file."""
    name, stages, ranks, micro_batches = of_file(path)
    lines = [" ".join(line.split()) for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert own.as_text(named(name).actions(stages, ranks, micro_batches)).splitlines() == lines


def test_every_schedule_has_a_file() -> None:
    assert {of_file(path)[0] for path in GOLDEN} == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_numbers_give_a_legal_schedule_that_ends(name: str) -> None:
    """200 draws: each action once, on the rank that holds the stage, gradients in order, and nobody waits for ever."""
    most = SCHEDULES[name].most_ranks or 8

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(ranks=st.integers(1, most), micro_batches=st.integers(1, 24), per_rank=PER_RANK.get(name, st.just(1)))
    def holds(ranks: int, micro_batches: int, per_rank: int) -> None:
        stages = ranks * per_rank
        actions = named(name).actions(stages, ranks, micro_batches)
        legal.check(actions, named(name).placement(stages, ranks))
        timeline = simulate(actions)
        ran = [run.action for runs in timeline.ranks for run in runs]
        assert Counter(ran) == Counter(one for rank in actions for one in rank)
        forwards = {(one.stage, one.micro_batch) for one in ran if one.kind is Kind.FORWARD}
        assert forwards == {(stage, index) for stage in range(stages) for index in range(micro_batches)}
        # Of every rank's time, counted in parts: F, I and W of each of its stages and micro-batches.
        assert timeline.ideal == 3 * per_rank * micro_batches

    holds()


@given(p=st.integers(1, 9), m=st.integers(1, 30))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_how_many_micro_batches_are_live(p: int, m: int) -> None:
    assert peak_live(named("gpipe").actions(p, p, m)) == [m] * p
    assert peak_live(named("1f1b").actions(p, p, m)) == [min(m, p - rank) for rank in range(p)]
    assert max(peak_live(named("zbh1").actions(p, p, m))) == min(m, p)
    assert max(peak_live(named("zbh2").actions(p, p, m))) == min(m, 2 * p - 1)
    # Activations of stages that are half as large: as much memory as 1F1B's first rank.
    assert max(peak_live(named("zbv").actions(2 * p, p, m))) == 2 * min(m, p)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (4, 3, 12), (2, 4, 6)])
def test_interleaved_holds_what_narayanan_et_al_say(p: int, v: int, m: int) -> None:
    """The first rank begins with 2 (p - 1) + (v - 1) p forwards and one more, each of 1/v of its part of the model."""
    assert peak_live(named("interleaved").actions(v * p, p, m))[0] == 2 * (p - 1) + (v - 1) * p + 1


def test_interleaved_with_one_stage_a_rank_is_1f1b() -> None:
    for p, m in ((1, 3), (2, 5), (4, 3), (5, 11)):
        assert named("interleaved").actions(p, p, m) == named("1f1b").actions(p, p, m)


def test_one_rank_never_waits() -> None:
    for name, known in SCHEDULES.items():
        assert simulate(named(name).actions(known.stages_per_rank or 3, 1, 5)).bubble == 0


def test_zbv_turns_round_on_the_last_rank() -> None:
    assert named("zbv").placement(8, 4) == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert named("interleaved").placement(8, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_actions_have_one_way_to_be_written() -> None:
    action = Action(Kind.INPUT, 2, 13)
    assert (str(action), action.full) == ("I13", "I13.2")
