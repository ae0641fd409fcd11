"""What the search leaves out unseen is too large indeed: `at_least` never says more than the footprint."""

import random

import pytest

from zero3d.cli.plan import cluster_of
from zero3d.cli.plan_model import asked
from zero3d.planner.choice import Choice, ways_to_keep
from zero3d.planner.footprint import footprint
from zero3d.planner.judge import Aim, at_least, fits, impossible
from zero3d.planner.search import group_of, layouts

CONFIG = """
[model]
preset = "llama"
width = 128
layers = 8
heads = 4
kv_heads = 2
mlp_width = 256
[data]
sequence_length = 64
"""
DEVICES, SAMPLES = 8, 64


@pytest.fixture(scope="module")
def aim(tmp_path_factory: pytest.TempPathFactory) -> Aim:
    path = tmp_path_factory.mktemp("bounds") / "small.toml"
    path.write_text(CONFIG)
    cluster, model = cluster_of("H100", DEVICES, None, None), asked(str(path), None, allow_code=False)
    workload = model.workload("bf16", model.sequence)
    return Aim(
        cluster=cluster,
        devices=DEVICES,
        global_batch=SAMPLES,
        dtype="bf16",
        workload=workload,
        blocks=len(workload(1, False).order),
        host_memory=cluster.host.memory,
        machine=DEVICES,
    )


@pytest.fixture(scope="module")
def choices(aim: Aim) -> list[Choice]:
    groups = [group for layout in layouts(aim, [], lambda text: None) for group in group_of(aim, layout)]
    there = [one.changed(**way) for one in groups if impossible(aim, one) is None for way in ways_to_keep(one.dp)]
    return random.Random(0).sample(there, 200)


@pytest.mark.parametrize("courses", [False, True])
def test_a_bound_is_no_more_than_the_footprint(aim: Aim, choices: list[Choice], courses: bool) -> None:
    parts = []
    for choice in choices:
        found, bound = fits(aim, choice)[0].total, at_least(aim, choice, courses=courses)
        assert bound <= found, choice
        parts.append(bound / found)
    assert max(parts) > 0.5, "it says something"


@pytest.mark.parametrize(("pp", "schedule", "stages_per_rank"), [(3, "1f1b", 1), (5, "zbh1", 1), (3, "interleaved", 2)])
def test_what_fits_is_the_rank_that_holds_most(aim: Aim, pp: int, schedule: str, stages_per_rank: int) -> None:
    """Blocks that do not divide: of five ranks one in the middle has more of them than the first."""
    choice = Choice(
        dp=1,
        tp=1,
        pp=pp,
        samples=12,
        micro_batch=1,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        level=0,
    )
    keeping = choice.keeping(aim.weight, aim.threads)
    totals = [footprint(aim.workload(1, False), keeping, rank).total for rank in range(pp)]
    assert fits(aim, choice)[0].total == max(totals)
    assert max(totals) > totals[0] or pp != 5
