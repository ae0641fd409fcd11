"""What cannot be cut into stages is refused on every rank, with what would work, before anything is trained."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from tests.pipeline_runs import adamw, assert_close
from tests.ranks.test_pipeline_models import WIDTH, Trace, batches, call, linear, loss
from tests.world import RankError, run_ranks

pytestmark = pytest.mark.ranks


class HeadFirst(nn.Module):
    """Registers its head before its blocks, and an embedding of places after them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 31)
        self.embed = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(linear() for _ in range(4))
        self.places = nn.Embedding(16, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


class Between(nn.Module):
    """Changes what a block gave in place, outside of all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(linear() for _ in range(4))
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            x += 1
        return self.head(x)  # type: ignore[no-any-return]


class Kinds(Between):
    """A block that gives what has no place in a message."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = linear()

        def forward(self, x: Tensor) -> Any:
            return {"x": self.one(x), "set": {1, 2}}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Kinds.Block() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)["x"]
        return self.head(x)  # type: ignore[no-any-return]


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=31, d_model=8, d_kv=4, d_ff=8, num_layers=4, num_decoder_layers=4, num_heads=2
    )
    return transformers.T5ForConditionalGeneration(config)


def no_blocks() -> nn.Module:
    return nn.Sequential(nn.Embedding(31, WIDTH), nn.Linear(WIDTH, 31))


def compiled() -> nn.Module:
    model = Between()
    model.blocks[1].compile()
    return model


def plain_tiny() -> nn.Module:
    return tiny.tiny(tied=False)


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "several lists": (t5, {}, ["encoder", "decoder", "model.blocks", "zero.level = 3"]),
    "no blocks": (no_blocks, {}, ["no list of repeated blocks", "model.blocks"]),
    "more stages than blocks": (plain_tiny, {"schedule": "interleaved", "stages_per_rank": 3}, ["4", "6"]),
    "blocks by hand": (plain_tiny, {"stage_blocks": [1, 2]}, ["stage_blocks"]),
    "zbv with one stage a rank": (
        plain_tiny,
        {"schedule": "zbv"},
        ["has 2 stages on each rank", "Set parallel.stages_per_rank = 2"],
    ),
    "1f1b with two": (plain_tiny, {"stages_per_rank": 2}, ["1f1b", "interleaved"]),
    "no such schedule": (plain_tiny, {"schedule": "1fb1"}, ["1fb1", "1f1b"]),
    "compiled": (compiled, {}, ["blocks.1", "torch.compile"]),
}


def refusals(names: list[str]) -> list[str]:
    found = []
    for name in names:
        build, parallel, _ = REFUSED[name]
        try:
            zero3d.Engine(build(), loss, adamw, {"parallel": {"pp": 2, **parallel}}, call=call)
        except zero3d.Zero3dError as error:
            found.append(f"{error} {error.hint}")
        else:
            found.append("nothing was refused")
    return found


def test_models_and_numbers_that_do_not_fit_are_refused_with_what_would() -> None:
    ranks = run_ranks(2, refusals, list(REFUSED))
    for found in ranks:
        for name, text in zip(REFUSED, found):
            assert all(word in text for word in REFUSED[name][2]), (name, text)
    assert ranks[0] == ranks[1]


SHOWN: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "head before the blocks": (HeadFirst, {"first_stage": ["places"]}, ["head", "parallel.last_stage"]),
    "embedding after the blocks": (HeadFirst, {"last_stage": ["head"]}, ["places", "parallel.first_stage"]),
    "in place": (Between, {"stage_blocks": [2, 2]}, ["blocks.1", "in place", "x = x + y"]),
    "a set": (Kinds, {}, ["blocks.0", "set"]),
}


def first_step(name: str) -> None:
    build, parallel, _ = SHOWN[name]
    engine = zero3d.Engine(build(), loss, adamw, {"parallel": {"pp": 2, "micro_batch": 2, **parallel}}, call=call)
    engine.step(batches()[0])


@pytest.mark.parametrize("name", SHOWN)
def test_what_shows_in_the_first_step_is_told_there(name: str) -> None:
    """By the rank that sees it first."""
    with pytest.raises(RankError) as failure:
        run_ranks(2, first_step, name, timeout=60, group_timeout=20)
    text = str(failure.value).rpartition("zero3d.errors.UsageError")[2]
    assert all(word in text for word in SHOWN[name][2]), failure.value


def placed() -> Trace:
    stages = {"pp": 2, "micro_batch": 2, "last_stage": ["head"], "first_stage": ["places"]}
    torch.manual_seed(0)
    engine = zero3d.Engine(HeadFirst(), loss, adamw, {"parallel": stages}, call=call)
    reports = [engine.step(batch) for batch in batches()]
    return Trace([one.loss for one in reports], [one.grad_norm for one in reports], engine.full_state_dict())


def test_a_head_before_the_blocks_works_once_it_is_said_where_it_runs() -> None:
    torch.manual_seed(0)
    expected = reference.train(HeadFirst(), loss, adamw, [[batch] for batch in batches()], call=call)
    for found in run_ranks(2, placed):
        assert_close(found, expected, "head first")
