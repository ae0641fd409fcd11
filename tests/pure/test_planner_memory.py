"""The memory table against the numbers of the ZeRO paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero3d.config import Config
from zero3d.planner.memory import LEVELS, ModelStates, Widths, at_each_level, states, widths_of


def test_the_papers_example_to_the_digits() -> None:
    """7.5 billion parameters over 64 ranks: figure 1 and table 1 of ZeRO."""
    totals = [states(7.5e9, level, dp=64).total / 1e9 for level in LEVELS]
    assert totals == [120.0, 31.40625, 16.640625, 1.875]
    assert [f"{total:.3g}" for total in totals] == ["120", "31.4", "16.6", "1.88"]


def test_gpt2_of_the_paper() -> None:
    """GPT-2 with 1.5 billion parameters: 3 GB of fp16 weights, 24 GB of model states."""
    one = states(1.5e9, 0, dp=1)
    assert one.weights == 3_000_000_000 and one.total == 24_000_000_000
    assert one.optimizer / one.total == 0.75


@given(parameters=st.integers(1, 10**12), dp=st.integers(1, 4096))
def test_a_higher_level_never_holds_more(parameters: int, dp: int) -> None:
    totals = [states(parameters, level, dp=dp).total for level in LEVELS]
    assert totals == sorted(totals, reverse=True)
    assert totals[3] * dp >= totals[0]  # nothing is lost


def test_one_rank_holds_the_same_at_each_level() -> None:
    assert len({states(1000, level, dp=1) for level in LEVELS}) == 1


def test_frozen_parameters_are_weights_alone() -> None:
    for level in LEVELS:
        trained, both = states(1000, level, dp=4), states(1000, level, dp=4, frozen=400)
        assert both.weights - trained.weights == (200 if level == 3 else 800)
        assert (both.gradients, both.optimizer) == (trained.gradients, trained.optimizer)


def test_gradients_reduced_once_a_step_are_whole_until_then() -> None:
    assert states(1000, 3, dp=4, reduce="step").gradients == 2000
    assert states(1000, 1, dp=4, reduce="micro-batch").gradients == 500
    assert states(1000, 0, dp=4, reduce="micro-batch").gradients == 2000


@pytest.mark.parametrize(
    ("settings", "widths"),
    [
        (
            ["precision.compute=bf16", "precision.gradients=compute"],
            Widths(weights=2, gradients=2, optimizer=12),
        ),
        (["precision.compute=bf16"], Widths(weights=2, gradients=4, optimizer=12)),
        (["precision.compute=fp32"], Widths(weights=4, gradients=4, optimizer=8)),
        (["precision.compute=fp16", "optimizer.name=sgd"], Widths(weights=2, gradients=4, optimizer=4)),
        (["precision.compute=fp32", "optimizer.name=SGD"], Widths(weights=4, gradients=4, optimizer=0)),
    ],
)
def test_widths_follow_the_configuration(settings: list[str], widths: Widths) -> None:
    """fp32 weights are their own master: K = 8 with Adam."""
    assert widths_of(Config.load({}, settings)) == widths


def test_the_table_of_a_configuration_uses_its_own_reduce_at_its_own_level() -> None:
    config = Config.load({}, ["zero.level=2", "zero.reduce=step", "precision.compute=fp32"])
    table = at_each_level(config, 1000, dp=4)
    assert table[2] == ModelStates(weights=4000, gradients=4000, optimizer=2000)
    assert table[3] == ModelStates(weights=1000, gradients=1000, optimizer=2000)


def test_replicas_shard_over_a_group_alone() -> None:
    for level in LEVELS:
        assert states(1000, level, dp=8, replicas=4, frozen=10) == states(1000, level, dp=2, frozen=10)
    config = Config.load({}, ["zero.replicas=2", "zero.level=3", "precision.compute=fp32"])
    assert at_each_level(config, 1000, dp=4)[3] == ModelStates(weights=2000, gradients=2000, optimizer=4000)
    with pytest.raises(ValueError, match="4 ranks cannot be cut into 3"):
        states(1, 1, dp=4, replicas=3)


def test_a_level_outside_0_to_3() -> None:
    with pytest.raises(ValueError, match="outside 0 to 3"):
        states(1, 4, dp=1)
