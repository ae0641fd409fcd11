"""Transformers models in pipeline stages, unedited: beside a plain loop, and as plain models in between.

Bit-equal: all ranks, what is written and read again, and what generates. Close (1e-5 in fp32): the plain loop. Whole
tensors have the names and shapes of the model that nobody cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.ranks.test_tensor_transformers import (
    CONFIGS,
    CUT,
    Run,
    distance,
    generate,
    made,
    plain,
    read_and_write,
    train,
)
from tests.world import run_ranks

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Staged(Run):
    schedule: str = "1f1b"

    def options(self) -> dict[str, Any]:
        options = super().options()
        options["parallel"] |= {"pp": 2, "schedule": self.schedule}
        return options


TWO = [Staged(1, 1, False, 0), Staged(1, 1, False, 3, "zbh1")]
FOUR = [Staged(1, 2, False, 1), Staged(1, 2, True, 3, "gpipe")]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("runs", [TWO, FOUR], ids=["pp2", "tp2 x pp2"])
def test_they_train_as_the_plain_loop(name: str, runs: Sequence[Staged]) -> None:
    ranks = run_ranks(2 * runs[0].tp, train, name, runs, timeout=180)
    expected, model = plain(name), made(name)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    largest = max(float(one.abs().max()) for one in expected.gradients.values() if one is not None)
    for number, run in enumerate(runs):
        trace = ranks[0][number]
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(trace.norms, expected.norms, rtol=1e-5, atol=0)
        assert {key: tuple(value.shape) for key, value in trace.weights.items()} == shapes, run
        for key, value in trace.weights.items():
            scale = max(float(expected.weights[key].abs().max()), 0.02)
            assert distance(value, expected.weights[key]) <= 1e-5 * scale, (run, key)
        assert trace.gradients.keys() == expected.gradients.keys()
        for key, value in trace.gradients.items():
            gradient = expected.gradients[key]
            # Keys' biases have no gradient but rounding.
            bound = 1e-5 * float(gradient.abs().max()) if "k_proj.bias" not in key else 1e-6 * largest
            assert distance(value, gradient) <= max(bound, 1e-7 * largest), (run, key)
        assert trace.tied == CONFIGS[name].tie_word_embeddings
        for found in ranks:
            same = found[number]
            assert (same.losses, same.norms) == (trace.losses, trace.norms), run
            assert all(torch.equal(value, trace.weights[key]) for key, value in same.weights.items()), run
    assert distance(expected.weights[CUT[name]], model.state_dict()[CUT[name]]) > 1e-3, "nothing was trained"


@pytest.mark.parametrize(("name", "run"), zip(CONFIGS, (*TWO, *FOUR, TWO[1])))
def test_they_are_used_as_plain_models(name: str, run: Staged) -> None:
    world = 2 * run.tp
    assert run_ranks(world, generate, name, run, timeout=120) == [True] * world
    run_ranks(world, read_and_write, name, run, timeout=120)
