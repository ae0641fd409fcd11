"""Drawn numbers of stages and micro-batches, with every schedule on 4 ranks.

Bit-equal: losses and weights of one stage. Equal: the most micro-batches that are live at a time, and those on paper.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn

import zero3d
from tests import tiny
from tests.pipeline_runs import adamw
from tests.ranks.test_pipeline_cases import steps
from tests.world import run_ranks
from zero3d.pipeline.schedules.registry import SCHEDULES
from zero3d.pipeline.simulate import peak_live

pytestmark = pytest.mark.ranks

Draw = tuple[str, int, int]
"""Schedule, stages on a rank, micro-batches."""


def drawn() -> list[Draw]:
    rng = random.Random(20)
    found: list[Draw] = [("zbh2", 1, 1), ("interleaved", 3, 2)]
    while len(found) < 20:
        schedule = rng.choice([name for name in SCHEDULES if name != "accumulate"])
        per_rank = rng.randint(1, 3) if schedule == "interleaved" else SCHEDULES[schedule].stages_per_rank or 1
        found.append((schedule, per_rank, rng.randint(1, 9)))
    return found


def run_drawn(pp: int, draws: Sequence[Draw]) -> list[Any]:
    """Losses, a digest of weights, and the most micro-batches that were live at a time."""
    found = []
    for schedule, per_rank, micro_batches in draws:
        most: list[int] = []

        def call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
            stages = engine._parts.stages.values()  # noqa: B023
            halves = {(id(stage), number) for stage in stages for number in (*stage._live, *stage._halves)}
            most.append(len(halves) + 1)  # noqa: B023
            return model(batch["tokens"])

        parallel = {"pp": pp, "micro_batch": 1, "schedule": schedule, "stages_per_rank": per_rank}
        parallel = parallel if pp > 1 else {"micro_batch": 1}
        sections = {"parallel": parallel, "zero": {"level": 1, "reduce": "step"}}
        engine = zero3d.Engine(tiny.tiny(layers=4 * per_rank, tied=False), tiny.loss, adamw, sections, call=call)
        losses = [one.loss for one in steps(engine, 1, micro_batches)]
        digest = [float(value.double().sum()) for value in engine.full_state_dict().values()]
        found.append((losses, digest, max(most)))
        engine.close()
    return found


def test_drawn_schedules_run_with_the_numbers_of_one_stage_and_as_many_live_micro_batches_as_on_paper() -> None:
    draws = drawn()
    expected = run_ranks(1, run_drawn, 1, draws, timeout=120)[0]
    ranks = run_ranks(4, run_drawn, 4, draws, timeout=120)
    for number, (schedule, per_rank, micro_batches) in enumerate(draws):
        on_paper = peak_live(SCHEDULES[schedule].actions(4 * per_rank, 4, micro_batches))
        assert [found[number][2] for found in ranks] == on_paper, draws[number]
        for found in ranks:
            assert found[number][:2] == expected[number][:2], draws[number]
