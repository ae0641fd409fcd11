"""Weights' gradients that are computed where they are kept are the same bits in every layout that promises it.

The products here are longer (512 tokens) than what a matrix product adds up before it looks at what is there, so that
a layout that added up otherwise would show.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import zero3d
from tests.world import run_ranks
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.losses import next_token_loss

pytestmark = pytest.mark.ranks

LENGTH, SAMPLES, STEPS = 128, 16, 2
Found = tuple[list[float], dict[str, Tensor]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(options: list[dict[str, Any]]) -> list[Found]:
    """Losses, and some of the weights, of each of the options."""
    found = []
    for one in options:
        torch.manual_seed(0)
        config = GPTConfig(vocabulary=64, sequence_length=LENGTH, width=512, layers=2, heads=4, tied=False)
        engine = zero3d.Engine(GPT(config), next_token_loss, sgd, one)
        losses = [engine.step(batch).loss for batch in batches(engine)]
        state = {name: value for name, value in engine.full_state_dict().items() if "blocks" in name}
        engine.close()
        found.append((losses, state))
    return found


def batches(engine: zero3d.Engine) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 64, (SAMPLES, LENGTH + 1), generator=generator) for _ in range(STEPS)]
    mine = [tokens.chunk(engine.dp_size)[engine.dp_index] for tokens in drawn]
    return [{"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()} for tokens in mine]


def refuse_other(found: list[Found]) -> None:
    losses, state = found[0]
    for others, other in found[1:]:
        assert others == losses
        assert all(torch.equal(state[name], other[name]) for name in state)


def options(zero: dict[str, Any], **parallel: Any) -> dict[str, Any]:
    return {"parallel": {"micro_batch": 4, **parallel}, "zero": zero}


@pytest.mark.parametrize("reduce", ["step", "micro-batch"])
def test_levels_and_homes_give_the_same_bits(reduce: str) -> None:
    asked = [options({"level": level, "reduce": reduce}) for level in range(4)]
    asked.append(options({"level": 2, "reduce": reduce, "bucket_mb": 0.5, "overlap": False}))
    asked.append(options({"level": 2, "reduce": reduce}) | {"offload": {"optimizer": "host"}})
    refuse_other(run_ranks(2, train, asked, timeout=240)[0])


def test_schedules_give_the_bits_of_one_stage() -> None:
    (alone,) = run_ranks(1, train, [options({"reduce": "step"})], timeout=120)
    asked = [options({"reduce": "step"}, pp=2, schedule=name) for name in ("gpipe", "1f1b", "zbh1")]
    asked.append(options({"reduce": "step", "level": 3}, pp=2, schedule="1f1b"))
    found = run_ranks(2, train, asked, timeout=240)
    refuse_other([alone[0], *found[0]])
