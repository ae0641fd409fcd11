"""The planner's time of a step, on workloads so simple that its parts can be worked out by hand."""

from dataclasses import replace
from math import fsum

import pytest

from zero3d.config import Config
from zero3d.errors import ConfigError, UsageError
from zero3d.pipeline.schedules.registry import named
from zero3d.pipeline.simulate import Costs, simulate
from zero3d.planner.hardware import PRESETS, Cluster, Device, Host, Link, Rates, find
from zero3d.planner.network import Group, collective, message
from zero3d.planner.run import Run
from zero3d.planner.speed import RECOMPUTE, Software
from zero3d.planner.timing import StepTime, stage_blocks, step_time
from zero3d.planner.waiting import makespan, rough
from zero3d.planner.workload import Amount, Call, Parameter, Part, Pass, Product, Workload

IDEAL = Rates(matrix=1, half=0, attention=1, moving=1, link=1, pair=1, hop=0, hidden=1)
"""All peaks are reached, and traffic hides as far as there is time."""
CLUSTER = Cluster(
    device=Device(name="ideal", flops={"bf16": 1e12}, memory=1e9, bandwidth=1e12, launch=0, rates=IDEAL),
    per_node=4,
    inside=Link(latency=0, bandwidth=1e9),
    across=Link(latency=0, bandwidth=1e8),
    host=Host(memory=1e9, cores=4, update=1e6, copy_rate=1e9),
)
SIZE = 1000
PRODUCT = Product(m=SIZE, n=SIZE, k=SIZE)
"""2 ms on the ideal device."""
BLOCK = Part(
    name="block",
    forward=Pass(products=[PRODUCT]),
    backward=Pass(products=[PRODUCT]),
    weights=[PRODUCT],
    parameters=[Parameter("weight", (SIZE, SIZE), "bfloat16")],
    leaving=Amount(each=2 * SIZE * SIZE),
)
BLOCKS = 4


def workload(block: Part = BLOCK, blocks: int = BLOCKS, tp: int = 1) -> Workload:
    return Workload(
        name="blocks",
        tp=tp,
        sequence_parallel=False,
        tokens=SIZE,
        dtype="bf16",
        before=Part(name="before"),
        kinds=[block],
        order=[0] * blocks,
        after=Part(name="after"),
    )


def seconds(run: Run, cluster: Cluster = CLUSTER, **changes: object) -> StepTime:
    step = step_time(cluster, workload(), replace(run, **changes))  # type: ignore[arg-type]
    causes = ("products", "attention", "moving", "tp", "again", "gathers", "reductions", "idle", "update", "host")
    assert fsum(getattr(step, cause) for cause in causes) == pytest.approx(step.seconds)
    return step


ONE = Run(micro_batches=1)


def test_a_rank_alone_computes_and_updates() -> None:
    step = seconds(ONE)
    assert step.products == pytest.approx(3 * BLOCKS * 2e-3)
    # 34 bytes a parameter: gradient (for the norm too), master and moments read and written, weight written.
    assert step.update == pytest.approx(BLOCKS * SIZE**2 * 34 / 1e12)
    assert step.exposed == step.idle == 0
    assert step.flops == 3 * BLOCKS * 2 * SIZE**3 == step.flops_done
    assert step.mfu == pytest.approx(step.flops / step.seconds / 1e12)
    assert step.tokens_per_second == pytest.approx(SIZE / step.seconds)


def test_what_is_computed_again_takes_time_and_counts_as_no_model_flops() -> None:
    once, again = seconds(ONE), seconds(ONE, recompute=RECOMPUTE["block"])
    assert again.again == pytest.approx(BLOCKS * 2e-3) == again.seconds - once.seconds
    assert again.flops == once.flops
    assert again.flops_done == pytest.approx(4 / 3 * once.flops)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [4, 8, 100])
def test_equal_stages_are_idle_for_p_minus_1_micro_batches(schedule: str, micro_batches: int) -> None:
    fast = CLUSTER.with_changes(inside=Link(latency=0, bandwidth=1e18))
    step = seconds(ONE, fast, pp=4, schedule=schedule, micro_batches=micro_batches, software=Software(fused_sums=True))
    assert step.bubble == pytest.approx(3 / micro_batches)


def test_messages_between_stages_take_time_that_grows_with_them() -> None:
    slow, fast = (
        seconds(ONE, CLUSTER.with_changes(inside=Link(latency=0, bandwidth=rate)), pp=2, micro_batches=4).seconds
        for rate in (1e9, 1e10)
    )
    assert slow > fast


@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbh2", 1), ("zbv", 2)]
)
def test_many_micro_batches_take_what_simulating_all_of_them_says(schedule: str, per_rank: int) -> None:
    """Exactly where they fill whole rounds; close where they do not."""
    ranks = 4
    stages = ranks * per_rank
    costs = tuple(1 + 0.1 * (stage % 3) for stage in range(stages))
    for micro_batches, tolerance in ((3, 1e-9), (48, 1e-9), (51, 5e-3)):
        found = makespan(schedule, ranks, micro_batches, costs, costs, costs, 0.1)
        actions = named(schedule).actions(stages, ranks, micro_batches)
        times = Costs(forward=costs, input_backward=costs, weight_backward=costs, transfer=0.1)
        assert found == pytest.approx(simulate(actions, times).makespan, rel=tolerance)


@pytest.mark.parametrize(
    ("schedule", "per_rank", "tolerance"),
    [("gpipe", 1, 0), ("1f1b", 1, 0), ("interleaved", 2, 0), ("zbh1", 1, 0), ("zbh2", 1, 0.05), ("zbv", 2, 0.05)],
)
def test_the_rough_formula_is_the_simulator_s_time_of_equal_stages(
    schedule: str, per_rank: int, tolerance: float
) -> None:
    """Exactly without messages, but for the two schedules whose bubble no formula gives."""
    for ranks in (2, 4, 8):
        costs = tuple((one,) * ranks * per_rank for one in (1.0, 1.1, 0.9))
        for transfer, more in ((0.0, 0.0), (0.05, 0.03)):
            exact = makespan(schedule, ranks, 2 * ranks, *costs, transfer)
            assert rough(schedule, ranks, 2 * ranks, *costs, transfer) == pytest.approx(
                exact, rel=1e-9 + tolerance + more
            )


def test_levels_expose_what_computing_does_not_hide() -> None:
    """A block's product takes 2 ms forward and 4 ms backward, its 2 MB over 4 ranks of a node 1.5 ms to gather."""
    run = Run(dp=4, level=3, reduce="micro-batch", travel=2)
    step = seconds(run)
    gather = 2e6 * 3 / 4 / 1e9
    # The first gather of forward and of backward, and the last reduction; all others are behind a block.
    assert step.gathers == pytest.approx(3 * gather)
    unhidden = seconds(run, software=Software(overlap_dp=False))
    assert unhidden.gathers == pytest.approx(3 * BLOCKS * gather)
    reduced = seconds(run, level=2)
    assert reduced.gathers == pytest.approx(gather)
    # New weights are gathered behind the next forward.
    assert reduced.reductions == pytest.approx(max(0.0, BLOCKS * (gather - 2e-3)))
    assert seconds(run, level=1).update == pytest.approx(seconds(run, level=0).update / 4)


def test_gathering_once_a_step_takes_a_part_of_it() -> None:
    run = Run(dp=4, level=3, micro_batches=4, software=Software(overlap_dp=False))
    each, once = (seconds(run, keep_gathered=kept).gathers for kept in (False, True))
    assert once == pytest.approx(each / 8)


def test_a_slower_network_across_nodes_shows() -> None:
    run = Run(dp=8, level=3, reduce="micro-batch", travel=2)
    near, far = (seconds(run, CLUSTER.with_changes(per_node=per_node)) for per_node in (8, 4))
    assert far.gathers > near.gathers


def test_the_host_updates_at_its_own_rate_and_later_if_delayed() -> None:
    run = Run(dp=4, level=2, reduce="micro-batch", offload=1)
    step = seconds(run)
    assert step.host >= BLOCKS * SIZE**2 / 1e6  # All four ranks of a node share the host.
    assert step.update < seconds(run, offload=0.5).update < seconds(run, offload=0).update
    delayed = seconds(run, delayed_update=True)
    assert delayed.host == pytest.approx(step.host - (step.seconds - step.host - step.update - step.reductions))


def test_calls_over_tp_are_hidden_behind_what_runs_meanwhile() -> None:
    call = Call("all_reduce", Amount(each=2e6))
    hidden = replace(call, behind=2 * SIZE**3)
    times = {}
    for name, one in {"waited": call, "hidden": hidden}.items():
        part = replace(BLOCK, backward=replace(BLOCK.backward, calls=[one]))
        times[name] = step_time(CLUSTER, workload(part, tp=2), ONE).tp
    assert times["waited"] == pytest.approx(BLOCKS * 2 * 2e6 / 2 / 1e9)
    assert times["hidden"] == pytest.approx(max(0.0, times["waited"] - BLOCKS * 2e-3))


def test_ranks_that_wait_in_calls_wait_for_the_slowest() -> None:
    """A tenth of what is computed between calls over tp, or between gathers; without calls nobody waits."""
    rates = IDEAL.model_copy(update={"skew": 0.1})
    uneven = CLUSTER.model_copy(update={"device": CLUSTER.device.model_copy(update={"rates": rates})})
    computing = BLOCKS * 6e-3
    for run, more in (
        (Run(micro_batches=2), 0.0),
        (Run(dp=4, level=2, reduce="step", micro_batches=2), 0.0),
        (Run(dp=4, level=3, reduce="step", micro_batches=2), 0.1 * 2 * computing),
        (Run(dp=4, level=3, reduce="step", micro_batches=2, keep_gathered=True), 0.1 * 2 * computing / 4),
    ):
        assert seconds(run, uneven).seconds - seconds(run).seconds == pytest.approx(more, abs=1e-9), run
    call = Call("all_reduce", Amount(each=2e6))
    part = replace(BLOCK, backward=replace(BLOCK.backward, calls=[call]))
    even, slowest = (step_time(one, workload(part, tp=2), ONE).tp for one in (CLUSTER, uneven))
    assert slowest - even == pytest.approx(0.1 * BLOCKS * 4e-3), "its backward is two products, its forward has no call"


def test_stages_are_cut_by_what_is_multiplied() -> None:
    embedding = Parameter("embedding", (10 * SIZE, SIZE), "bfloat16", multiplied=False)
    head = Parameter("head", (SIZE, SIZE), "bfloat16")
    model = replace(
        workload(blocks=7),
        before=Part(name="before", parameters=[embedding]),
        after=Part(name="after", parameters=[head]),
    )
    assert [len(blocks) for blocks in stage_blocks(model, Run(pp=4))] == [2, 2, 2, 1]
    assert [len(blocks) for blocks in stage_blocks(model, Run(pp=2, stage_blocks=(1, 6)))] == [1, 6]
    with pytest.raises(ConfigError, match="8 stages"):
        step_time(CLUSTER, model, Run(pp=8))


def test_collectives_over_two_levels() -> None:
    assert collective(CLUSTER, Group(1), "all_reduce", 1e9) == 0
    assert collective(CLUSTER, Group(4), "all_gather", 1e9) == pytest.approx(0.75)
    assert collective(CLUSTER, Group(4), "all_reduce", 1e9) == pytest.approx(1.5)
    # Two nodes: half of it over 4 links of 1e8.
    assert collective(CLUSTER, Group(8), "all_gather", 1e9) == pytest.approx(0.5 * 1e9 / 4e8)
    assert collective(CLUSTER, Group(8), "all_gather", 1e9, one_ring=True) == pytest.approx(0.5 * 1e9 / 1e8)
    # Every fourth rank: each is in a node of its own.
    assert collective(CLUSTER, Group(2, stride=4), "all_gather", 1e9) == pytest.approx(0.5 * 1e9 / 1e8)
    assert message(CLUSTER, 1, 1e9) == pytest.approx(1)
    assert message(CLUSTER, 4, 1e9) == pytest.approx(10)


def test_small_products_and_unfused_operations_are_slower() -> None:
    device = CLUSTER.device.model_copy(update={"rates": IDEAL.model_copy(update={"half": SIZE})})
    slow = step_time(CLUSTER.with_changes(device=device), workload(), ONE)
    assert slow.products == pytest.approx(8 * seconds(ONE).products)
    part = replace(BLOCK, forward=replace(BLOCK.forward, moved=Amount(each=1e9), launches=5))
    each, joined = (
        step_time(CLUSTER, workload(part), replace(ONE, software=Software(compiled=compiled))).moving
        for compiled in (False, True)
    )
    assert each == pytest.approx(BLOCKS * 1e-3)
    assert joined < each


def test_a_run_is_what_its_configuration_says() -> None:
    config = Config.load(
        {
            "data": {"global_batch": 32},
            "parallel": {"pp": 2, "micro_batch": 2, "schedule": "interleaved", "stages_per_rank": 2},
            "zero": {"level": 1},
            "precision": {"compute": "bf16"},
            "recompute": {"mode": "block"},
        }
    ).resolved(8, native_bf16=True)
    run = Run.of(config)
    assert (run.dp, run.pp, run.stages, run.micro_batches, run.samples) == (4, 2, 4, 4, 32)
    assert (run.level, run.reduce, run.travel, run.held) == (1, "step", 4, 4)
    assert run.recompute == RECOMPUTE["block"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_found_in_any_case_and_survive_json(name: str) -> None:
    cluster = find(name.lower())
    assert cluster == PRESETS[name] == Cluster.from_json(cluster.to_json())


def test_unknown_devices_are_refused_with_near_ones() -> None:
    with pytest.raises(UsageError) as caught:
        find("A100-80")
    assert "A100-80GB" in str(caught.value.hint)
    with pytest.raises(UsageError, match=r"device\.memory"):
        Cluster.from_json(CLUSTER.to_json().replace('"memory"', '"memry"', 1))
    with pytest.raises(UsageError, match="no-such-file"):
        find("no-such-file.json")
    with pytest.raises(UsageError, match="fp8"):
        CLUSTER.device.peak("fp8")
