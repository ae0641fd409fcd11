"""The memory table against the numbers of the ZeRO paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero3d.config import Config, Offload
from zero3d.planner.memory import LEVELS, ModelStates, Widths, at_each_level, most_parameters, states, table, widths_of


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


@pytest.mark.parametrize("level", [1, 2, 3])
def test_offload_leaves_the_weights_on_the_device(level: int) -> None:
    """Device 2 Psi, or 2 Psi / N at level 3; host 12 Psi / N and the gradient."""
    one = states(8000, level, dp=4, offload=Offload(optimizer="host"))
    assert (one.weights, one.gradients, one.optimizer) == (16000 if level < 3 else 4000, 0, 0)
    assert one.host == (12 + 2) * 2000 and one.disk == 0
    assert one.device == one.weights and one.total == one.device + one.host


def test_zero_offload_on_one_rank() -> None:
    """The paper's claim: 2 Psi in place of 16 Psi on the device, at each level the same."""
    for level in LEVELS:
        one = states(1000, level, dp=1, offload=Offload(optimizer="host"))
        assert (one.device, one.host) == (2000, 14000)
    with pytest.raises(ValueError, match="level 0 on 4 ranks"):
        states(1000, 0, dp=4, offload=Offload(optimizer="host"))


def test_offloaded_gradients_that_are_reduced_once_a_step_are_whole_on_the_device_until_then() -> None:
    one = states(8000, 2, dp=4, reduce="step", offload=Offload(optimizer="host"))
    assert one.gradients == 2 * 8000 and one.host == 14 * 2000


def test_weights_on_the_host_leave_nothing_on_the_device() -> None:
    one = states(8000, 3, dp=4, frozen=400, offload=Offload(optimizer="host", parameters="host"))
    assert one.device == 0 and one.host == 16 * 2000 + 2 * 100


def test_states_on_disk() -> None:
    one = states(8000, 2, dp=4, offload=Offload(optimizer="disk", folder="x"))
    assert (one.device, one.host, one.disk) == (16000, 2 * 2000, 12 * 2000)


def test_a_part_of_it() -> None:
    """Of a quarter of each shard the optimizer is on the host; nothing is held twice."""
    one = states(8000, 2, dp=4, offload=Offload(optimizer="host", fraction=0.25))
    assert (one.weights, one.gradients, one.optimizer, one.host) == (16000, 2 * 1500, 12 * 1500, 14 * 500)


@pytest.mark.parametrize("reduce", ["step", "micro-batch"])
@pytest.mark.parametrize("megabytes", [0.03, 0.035, 0.05])
def test_as_much_as_the_device_asks_for(megabytes: float, reduce: str) -> None:
    offload = Offload(optimizer="host", fraction="auto", device_mb=megabytes)
    one = states(8000, 2, dp=4, reduce=reduce, offload=offload)
    most = states(8000, 2, dp=4, reduce=reduce)
    least = states(8000, 2, dp=4, reduce=reduce, offload=Offload(optimizer="host"))
    wanted = min(max(megabytes * 1e6, least.device), most.device)
    assert wanted - 14 < one.device <= wanted, "to one element"


def test_a_delayed_update_holds_two_sets_of_gradients() -> None:
    plain, delayed = (states(8000, 2, dp=4, offload=Offload(optimizer="host", delayed_update=n)) for n in (0, 5))
    assert delayed.host - plain.host == 2 * 2000 and delayed.device == plain.device


def test_fp32_weights_are_their_own_master_only_beside_it() -> None:
    widths = Widths(weights=4, gradients=4, optimizer=8)
    one = states(1000, 2, dp=1, widths=widths, offload=Offload(optimizer="host"))
    assert one.device == 4 * 1000 and one.host == (4 + 4 + 8) * 1000


@given(
    parameters=st.integers(1, 10**12),
    level=st.integers(1, 3),
    dp=st.integers(1, 64),
    fraction=st.floats(0.01, 1),
    reduce=st.sampled_from(["step", "micro-batch"]),
)
def test_what_leaves_the_device_is_on_the_host(
    parameters: int, level: int, dp: int, fraction: float, reduce: str
) -> None:
    offload = Offload(optimizer="host", fraction=fraction)
    plain = states(parameters, level, dp=dp, reduce=reduce)
    one = states(parameters, level, dp=dp, reduce=reduce, offload=offload)
    sums = one.host // 14 * 2 if reduce == "step" else 0  # of the rank's part, besides those that are whole till then
    assert one.device <= plain.device and one.total - sums == plain.total


def test_the_table_of_a_configuration_offloads_where_a_level_can() -> None:
    tree = {"zero": {"level": 3}, "offload": {"optimizer": "host", "parameters": "host"}}
    config = Config.load(tree, ["precision.compute=bf16", "precision.gradients=compute"])
    table = at_each_level(config, 8000, dp=4)
    assert [one.device for one in table] == [16 * 8000, 16000, 16000, 0]
    assert [one.host for one in table] == [0, 14 * 2000, 14 * 2000, 16 * 2000]
    assert at_each_level(config, 8000, dp=1)[0].host == 14 * 8000


@pytest.mark.parametrize("level", LEVELS)
def test_the_largest_model_fills_its_devices(level: int) -> None:
    most = most_parameters(32e9, level, dp=64)
    assert states(most, level, dp=64).device == pytest.approx(32e9, rel=1e-9)
    assert most_parameters(32e9, level, dp=64, tp=4) == pytest.approx(4 * most)
    on_host = Offload(optimizer="host", parameters="host")
    assert most_parameters(32e9, 3, dp=64, offload=on_host) == float("inf")


def test_the_table_has_offload_where_a_level_can_do_it() -> None:
    rows = table(8000, dp=4)
    assert [(row.level, row.offload) for row in rows] == [
        *((level, None) for level in LEVELS),
        *((level, "optimizer") for level in (1, 2, 3)),
        (3, "parameters"),
    ]
    assert [row.offload for row in table(8000, dp=4, levels=(0,))] == [None]
    assert rows[-1].states.device == 0 and rows[-1].states.host == 16 * 2000


def test_optimizer_states_of_less_than_4_bytes_go_where_the_others_go() -> None:
    """8-bit Adam: K = 6. They are no fp32 tensors, and were lost on the host."""
    for home in ("host", "disk"):
        offload = Offload(optimizer=home, folder="x" if home == "disk" else None)  # type: ignore[arg-type]
        one = states(8000, 2, dp=4, widths=Widths(optimizer=6), offload=offload)
        assert one.host + one.disk == (2 + 6) * 2000
