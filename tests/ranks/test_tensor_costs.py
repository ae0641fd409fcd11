"""What tensor parallelism costs a block in bytes: sent, and kept for backward. Counted, not measured."""

from typing import Any

import pytest
import torch

import zero3d
from tests.world import run_ranks
from zero3d.models.gpt import GPT, GPTConfig

LENGTH, SAMPLES, WIDTH, HEADS = 128, 2, 256, 8
SBH = LENGTH * SAMPLES * WIDTH
BLOCK = "blocks.1."


def engine_for(tp: int, sequence: bool, compute: str) -> zero3d.Engine:
    config = GPTConfig(vocabulary=61, sequence_length=LENGTH, width=WIDTH, layers=3, heads=HEADS, dropout=0.1)
    return zero3d.Engine(
        lambda: GPT(config),
        lambda logits, batch: zero3d.cross_entropy(logits, batch["targets"]),
        "adamw",
        {
            "parallel": {"tp": tp, "sequence_parallel": sequence},
            "zero": {"level": 0},
            "precision": {"compute": compute},
            "data": {"sequence_length": LENGTH},
        },
    )


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 61, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def calls_of_a_block(tp: int, sequence: bool) -> list[tuple[str, str, int]]:
    engine = engine_for(tp, sequence, "fp32")
    engine.step(batch())
    engine.step(batch())
    return [(one.verb, one.label, one.sent_bytes) for one in engine._mesh.axes["tp"].calls]


@pytest.mark.parametrize("tp", [2, 4])
def test_a_block_sends_four_all_reduces(tp: int) -> None:
    for found in run_ranks(tp, calls_of_a_block, tp, False):
        calls = [call for call in found if BLOCK in call[1]]
        assert [verb for verb, _, _ in calls] == ["all_reduce"] * 4
        assert [sent for _, _, sent in calls] == [2 * 4 * SBH * (tp - 1) // tp] * 4
        # Two in forward, of rows' outputs; two in backward, of columns' inputs.
        assert [label.removeprefix(BLOCK) for _, label, _ in calls] == [
            "attention.out",
            "mlp.down",
            "mlp.up",
            "attention.qkv",
        ]


@pytest.mark.parametrize("tp", [2, 4])
def test_with_sequence_parallelism_gathers_and_scatters_send_the_same(tp: int) -> None:
    for calls in run_ranks(tp, calls_of_a_block, tp, True):
        part = 4 * SBH * (tp - 1) // tp
        again = [sent for _, label, sent in calls if BLOCK in label and label.endswith(", again")]
        norms = [(verb, sent) for verb, label, sent in calls if label.startswith("gradients of ")]
        rest = [(verb, sent) for verb, label, sent in calls if label.startswith(BLOCK) and "again" not in label]
        assert sorted(rest) == [("all_gather", part)] * 4 + [("reduce_scatter", part)] * 4
        # What is not kept whole for the gradients of weights is gathered once more.
        assert again == [part] * 2
        # Once a step: two norms of each block and the last one.
        assert norms == [("all_reduce", 2 * 4 * 7 * WIDTH * (tp - 1) // tp)]


def kept_by_a_block(tp: int, sequence: bool) -> float:
    """Bytes that autograd keeps of one block, in units of s b h, in bf16."""
    engine = engine_for(tp, sequence, "bf16")
    block, inside = engine.model.get_submodule("blocks.1"), False

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave)
    apart = {one.untyped_storage()._cdata for one in (*engine.model.parameters(), *engine.model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if inside and tensor.untyped_storage()._cdata not in apart:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.step(batch())
    core = attention_term(list(kept.values()), tp)
    assert len(core) == 2, "the kernel's own: its result head by head, and a number a row"
    return sum(one.untyped_storage().nbytes() for key, one in kept.items() if key not in core) / SBH


def attention_term(kept: list[torch.Tensor], tp: int) -> set[int]:
    """What the kernel keeps in place of the 5 a s / h of the formula. Its result comes after q, k and v."""
    by_head = (SAMPLES, HEADS // tp, LENGTH, WIDTH // HEADS)
    found = [one for one in kept if one.shape == by_head and one.dtype == torch.bfloat16][3:4]
    found += [one for one in kept if one.shape == by_head[:3]]
    return {one.untyped_storage()._cdata for one in found}


@pytest.mark.parametrize(
    ("tp", "sequence", "formula"),
    [(1, False, 34.0), (2, False, 10 + 24 / 2), (4, False, 10 + 24 / 4), (2, True, 34 / 2), (4, True, 34 / 4)],
)
def test_what_a_block_keeps_follows_the_formulas(tp: int, sequence: bool, formula: float) -> None:
    """Korthikanti et al. 2022, table 2."""
    for kept in run_ranks(tp, kept_by_a_block, tp, sequence):
        assert kept == pytest.approx(formula, rel=0.05)
