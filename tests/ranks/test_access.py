"""Whole tensors by name, read and written, at every level.

Bit-equal throughout: reading and writing copies. Gradients are compared with the plain loop's, close.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

PARTS: dict[str, Any] = {
    "a number": 3,
    "rows": slice(2, 5),
    "a column": (slice(None), 0),
    "steps": (slice(1, 30, 3), slice(4, None, 2)),
    "one element": (5, 6),
    "nothing": slice(7, 7),
    "the last rows": (slice(-2, None), ...),
    "a list": [1, 7, 1],
    "a mask": torch.arange(64) % 3 == 0,
}
TIED = "head.weight"
"""Another name of tokens.weight [64, 32]."""


def make(level: int, reduce: str = "step", precision: str = "fp32", model: nn.Module | None = None) -> zero3d.Engine:
    options = {"zero": {"level": level, "reduce": reduce, "bucket_mb": 0.02}, "precision": {"compute": precision}}
    return zero3d.Engine(model or tiny.tiny(), tiny.loss, tiny.adamw, options)


def frozen() -> nn.Module:
    model = tiny.tiny()
    model.places.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


def batch(rank: int) -> dict[str, Tensor]:
    return tiny.part(tiny.batches(1, 4)[0], rank, 2)


def gradients_plain() -> dict[str, Tensor | None]:
    steps = [[tiny.part(tiny.batches(1, 4)[0], rank, 2) for rank in (0, 1)]]
    return reference.train(tiny.tiny(), tiny.loss, tiny.adamw, steps, call=lambda m, b: m(b["tokens"])).gradients


def reads(level: int, reduce: str) -> tuple[dict[str, Tensor], dict[str, bool]]:
    engine = make(level, reduce)
    engine.step(batch(engine.rank))
    whole, gradient = engine.full_state_dict()[TIED], engine.grad_of(TIED)
    same = {what: torch.equal(engine.weight_of(TIED, part), whole[part]) for what, part in PARTS.items()}
    same |= {f"{what}'s": torch.equal(engine.grad_of(TIED, part), gradient[part]) for what, part in PARTS.items()}
    same |= {name: torch.equal(engine.weight_of(name), value) for name, value in engine.full_state_dict().items()}
    return {info.name: engine.grad_of(info.name) for info in engine.parameters}, same


@pytest.mark.parametrize("reduce", ["step", "micro-batch"])
def test_reads_weights_and_gradients_whole_and_in_part(reduce: str) -> None:
    [expected] = run_ranks(1, gradients_plain)
    for level in range(4) if reduce == "step" else (1, 3):
        for found, same in run_ranks(2, reads, level, reduce):
            assert all(same.values()), (level, same)
            for name, value in found.items():
                scale = float(expected[name].abs().max())  # type: ignore[union-attr]
                assert float((value - expected[name]).abs().max()) <= 1e-5 * scale, (level, name)


def moves_little() -> tuple[int, int]:
    """Bytes that this rank sends for two rows of a weight, and for all of it."""
    engine = make(3)
    sent = [engine._parts.axis.sent_bytes]
    for part in (slice(0, 2), None):
        engine.weight_of("blocks.0.up.weight", part)
        sent.append(engine._parts.axis.sent_bytes)
    return sent[1] - sent[0], sent[2] - sent[1]


def test_a_part_moves_its_own_elements_alone() -> None:
    for few, all_of_it in run_ranks(2, moves_little):
        assert few == 2 * 32 * 4 // 2 and all_of_it == 128 * 32 * 4 // 2  # half of what is broadcast, as in a ring


def writes(level: int, precision: str) -> tuple[dict[str, bool], Tensor, dict[str, Tensor]]:
    engine = make(level, precision=precision, model=frozen())
    engine.step(batch(engine.rank))
    same = {}
    generator = torch.Generator().manual_seed(5 + engine.rank)  # rank 0's value counts
    zeros = torch.Generator().manual_seed(5)
    for what, part in PARTS.items():
        expected = engine.full_state_dict()[TIED]
        value = torch.randn(expected[part].shape, generator=generator)
        expected[part] = torch.randn(expected[part].shape, generator=zeros)
        engine.set_weight(TIED, value, part)
        same[what] = torch.equal(engine.weight_of(TIED), expected) and torch.equal(
            engine.full_state_dict()["tokens.weight"], expected
        )
    for name in ("places", "blocks.1.up.weight", "blocks.3.down.bias"):
        engine.set_weight(name, torch.full(engine.weight_of(name).shape, 0.125))
        same[name] = bool((engine.full_state_dict()[name] == 0.125).all())
    with engine.gathered() as model:
        # What the model computes with, as many values as fit its dtype.
        found = dict(model.named_parameters())
        whole = {name: value.detach().clone() for name, value in found.items()}
        output = model(batch(0)["tokens"]).float()
    state = engine.full_state_dict()
    same["computes"] = all(torch.equal(value, state[name].to(value.dtype)) for name, value in whole.items())
    engine.step(batch(engine.rank))
    return same, output, engine.full_state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_writes_masters_and_what_the_model_computes_with(precision: str) -> None:
    levels = range(4) if precision == "fp32" else (1, 3)
    results = [one for level in levels for one in run_ranks(2, writes, level, precision)]
    for same, output, state in results:
        assert all(same.values()), same
        assert torch.equal(output, results[0][1])
        assert all(torch.equal(value, results[0][2][name]) for name, value in state.items())


def loads(level: int) -> tuple[bool, tuple[list[str], list[str]], str, str, bool]:
    """Weights that another engine was trained to; then a state that does not fit."""
    source = make(0)
    source.step(batch(source.rank))
    state = source.full_state_dict()
    engine = make(level)
    told = engine.load_state_dict(state)
    same = all(torch.equal(value, state[name]) for name, value in engine.full_state_dict().items())
    before = engine.full_state_dict()
    with pytest.raises(zero3d.UsageError) as caught:
        engine.load_state_dict({**state, "norm.bias": torch.zeros(3), "more": torch.zeros(1)})
    with pytest.raises(zero3d.UsageError) as direct:
        engine.model.load_state_dict(state)
    engine.load_state_dict({"norm.bias": torch.ones(32)}, strict=False)
    after = engine.full_state_dict()
    kept = all(torch.equal(value, before[name]) for name, value in after.items() if name != "norm.bias")
    return same, told, str(caught.value), str(direct.value), kept and bool((after["norm.bias"] == 1).all())


@pytest.mark.parametrize("level", range(4))
def test_loads_whole_tensors(level: int) -> None:
    for same, told, text, direct, kept in run_ranks(2, loads, level):
        assert same and told == ([], []) and kept
        assert "norm.bias" in text and "besides more" in text
        assert "engine.load_state_dict(state)" in direct


def in_gathered(level: int, precision: str) -> tuple[str, list[bool]]:
    engine = make(level, precision=precision)
    engine.step(batch(engine.rank))
    with pytest.raises(zero3d.UsageError) as caught, engine.gathered() as model:
        model.blocks[2].up.weight.mul_(2)  # type: ignore[union-attr,index,operator]
    engine = make(level, precision=precision)
    engine.step(batch(engine.rank))
    before = engine.full_state_dict()
    with engine.gathered(write=True) as model:
        if engine.rank == 0:
            model.tokens.weight[3] = 0.5  # type: ignore[union-attr,operator,index]
        else:
            model.norm.bias.fill_(7.0)  # type: ignore[union-attr,operator]
    after = engine.full_state_dict()
    others = [name for name in before if name not in ("tokens.weight", "head.weight")]
    found = [bool((after["head.weight"][3] == 0.5).all()), not bool((before["head.weight"][3] == 0.5).all())]
    # Rank 1's alone: rank 0's value stands, rounded to what the model computes in.
    rounded = before["norm.bias"].to(next(engine.model.parameters()).dtype).float()
    found += [all(torch.equal(after[name], before[name]) for name in others if name != "norm.bias")]
    found += [torch.equal(after["norm.bias"], rounded)]
    with engine.gathered(write=True) as model:
        same = all(torch.equal(value, after[name].to(value.dtype)) for name, value in model.named_parameters())
    return str(caught.value), [*found, same]


@pytest.mark.parametrize(("level", "precision"), [*((level, "fp32") for level in range(4)), (1, "bf16"), (3, "bf16")])
def test_writing_inside_gathered_is_kept_or_an_error(level: int, precision: str) -> None:
    """It was lost in silence at levels 1 to 3, on one rank or on all."""
    for text, found in run_ranks(2, in_gathered, level, precision):
        assert "blocks.2.up.weight was written to" in text and "set_weight" in text
        assert found == [True] * 5


def refused(level: int) -> list[str]:
    engine = make(level, model=frozen())
    texts = []
    for call in (
        lambda: engine.set_weight("norm.bias", torch.zeros(31 if engine.rank else 32)),
        lambda: engine.set_weight("norm.bias", torch.zeros(3), slice(0, 2)),
        lambda: engine.set_weight("norm.bia", torch.zeros(32)),
        lambda: engine.weight_of("norm.bias", 32),
        lambda: engine.grad_of("norm.bias"),
        lambda: engine.grad_of("places"),
    ):
        with pytest.raises(zero3d.UsageError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_refusals_come_on_every_rank() -> None:
    for texts in run_ranks(2, refused, 3):
        assert "norm.bias has shape [32]" in texts[0]
        assert "in that part, has shape [2]" in texts[1]
        assert "no parameter norm.bia" in texts[2]
        assert "no part of norm.bias" in texts[3]
        assert "no gradient of norm.bias yet" in texts[4]
        assert "places is frozen" in texts[5]
