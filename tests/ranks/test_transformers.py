"""Transformers models as their configurations build them, unedited: at every level they train as a plain loop does.

Close, 1e-5 in fp32: the plain loop, which adds a whole batch at once. Bit-equal: levels 0 to 3 among each other, and a
model that a function builds and one that was built before, from the same weights.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

import zero3d
from tests import reference
from tests.world import run_ranks
from zero3d.zero.units import find_blocks

pytestmark = pytest.mark.ranks

STEPS, RANKS, SAMPLES, LENGTH, VOCABULARY = 3, 2, 4, 10, 61

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = transformers.GPT2Config(
    vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    bos_token_id=1, eos_token_id=2
)  # fmt: skip
T5 = transformers.T5Config(
    vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0,
    decoder_start_token_id=0, tie_word_embeddings=True
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    auto: Any
    config: Any
    num_blocks: int
    """Found without their lists being named."""

    def __call__(self) -> nn.Module:
        model: nn.Module = self.auto.from_config(copy.deepcopy(self.config))
        return model


CASES = {
    "gpt2": Case(AutoModelForCausalLM, GPT2, 3),
    "llama": Case(AutoModelForCausalLM, transformers.LlamaConfig(**DECODER), 3),
    "qwen3": Case(
        AutoModelForCausalLM,
        transformers.Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True),
        3,
    ),
    "mixtral": Case(
        AutoModelForCausalLM,
        transformers.MixtralConfig(**DECODER, num_local_experts=8, num_experts_per_tok=1),
        3,
    ),
    "bert": Case(
        AutoModelForMaskedLM,
        transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **ENCODER),
        2,
    ),
    "t5": Case(AutoModelForSeq2SeqLM, T5, 4),
    "vit": Case(
        AutoModelForImageClassification,
        transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **ENCODER),
        2,
    ),
}


def batches(name: str) -> list[dict[str, Tensor]]:
    """The global batches of a model; the ends of some texts are padding."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, high: int = VOCABULARY) -> Tensor:
        return torch.randint(3, high, shape, generator=generator)

    made: list[dict[str, Tensor]] = []
    for _ in range(STEPS):
        if name == "vit":
            pixels = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
            made.append({"pixel_values": pixels, "labels": draw(SAMPLES, high=8) - 3})
            continue
        tokens, mask = draw(SAMPLES, LENGTH), torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
        mask[1, 7:] = mask[3, 4:] = 0
        labels = draw(SAMPLES, 6) if name == "t5" else tokens.clone()
        labels[0, 2:5] = -100
        if name != "t5":
            labels[mask == 0] = -100
        made.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return made


def loss_of(name: str) -> Callable[[Any, dict[str, Tensor]], tuple[Tensor, Any]]:
    shifted = CASES[name].auto is AutoModelForCausalLM

    def loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        logits, labels = output.logits, batch["labels"]
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
        return total, (labels != -100).sum()

    return loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)


def part(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {key: value.chunk(RANKS)[rank] for key, value in batch.items()}


@dataclass
class Found:
    trace: reference.Trace
    notice: str
    num_blocks: int


def options_for(level: int, **sections: Any) -> dict[str, Any]:
    return {"zero": {"level": level, "reduce": "micro-batch"}, "parallel": {"micro_batch": 1}, **sections}


def trained(name: str, source: Any, options: dict[str, Any]) -> Found:
    engine = zero3d.Engine(source, loss_of(name), adamw, options)
    reports = [engine.step(part(batch, engine.rank)) for batch in batches(name)]
    losses, norms = [one.loss for one in reports], [one.grad_norm for one in reports]
    trace = reference.Trace(losses, norms, engine.full_state_dict(), {})
    return Found(trace, engine.notice, len(find_blocks(engine.model)[1]))


def started(name: str, start: dict[str, Tensor], **settings: Any) -> nn.Module:
    """The model as it is built, then loaded."""
    config = copy.deepcopy(CASES[name].config)
    config.update(settings)
    model: nn.Module = CASES[name].auto.from_config(config)
    model.load_state_dict(start)
    return model


def train(name: str) -> tuple[dict[str, Tensor], dict[object, Found]]:
    """The first weights; what training made of them at each level from a function that builds the model, and at level
    3 from a module that has them, also with its blocks recomputed."""
    start = zero3d.Engine(CASES[name], loss_of(name), adamw, options_for(3)).full_state_dict()
    found: dict[object, Found] = {level: trained(name, CASES[name], options_for(level)) for level in range(4)}
    found["module"] = trained(name, started(name, start), options_for(3))
    # A cache, which training does not need, would be written to again by what is recomputed.
    no_cache = started(name, start, use_cache=False)
    found["recomputed"] = trained(name, no_cache, options_for(3, recompute={"mode": "block"}))
    return start, found


def plain(name: str, start: dict[str, Tensor]) -> reference.Trace:
    parts = [[part(part(batch, rank), half) for rank in range(RANKS) for half in range(2)] for batch in batches(name)]
    return reference.train(started(name, start), loss_of(name), adamw, parts, call=lambda model, batch: model(**batch))


KEY_BIASES = ("key.bias", "k_proj.bias")
"""A key's bias moves all scores of a query alike: its gradient is rounding, and it stays at zero but for that."""


def assert_close(found: reference.Trace, expected: reference.Trace, what: object) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=0)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in found.weights.items():
        scale = float(expected.weights[name].abs().max())
        error = float((value - expected.weights[name]).abs().max())
        assert error <= (1e-7 if name.endswith(KEY_BIASES) else 1e-5 * scale), (what, name, error, scale)


def assert_same_bits(one: reference.Trace, other: reference.Trace, what: object) -> None:
    assert (one.losses, one.norms) == (other.losses, other.norms), what
    assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items()), what


@pytest.mark.parametrize("name", CASES)
def test_every_level_trains_as_the_plain_loop(name: str) -> None:
    ranks = run_ranks(RANKS, train, name)
    start = ranks[0][0]
    [expected] = run_ranks(1, plain, name, start)
    assert any(not torch.equal(value, start[key]) for key, value in expected.weights.items())
    for _, found in ranks:
        for what, one in found.items():
            assert (one.notice, one.num_blocks) == ("", CASES[name].num_blocks)
            assert_same_bits(one.trace, ranks[0][1][0].trace, what)
            assert_close(one.trace, expected, what)


def generate(name: str) -> tuple[bool, list[int], list[int], list[str]]:
    """C37: whether generation of this rank's own length equals plain generation of the same weights; the lengths, and
    what was gathered for it."""
    engine = zero3d.Engine(CASES[name], loss_of(name), adamw, options_for(3))
    engine.step(part(batches(name)[0], engine.rank))
    whole = started(name, engine.full_state_dict()).eval()
    calls = engine._parts.axis.calls
    prompt = torch.tensor([[5, 6, 7]])
    length = 4 + 9 * engine.rank
    options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    calls.clear()
    with engine.gathered() as model:
        found = model.generate(prompt, **options)
    gathers = [call.label for call in calls if call.verb == "all_gather" and call.label.startswith("weights of ")]
    others = len(calls) - len(gathers)
    engine.step(part(batches(name)[1], engine.rank))
    return torch.equal(found, whole.generate(prompt, **options)), [found.shape[1], others], gathers, buckets(engine)


def buckets(engine: zero3d.Engine) -> list[str]:
    return [f"weights of {shard.bucket.label}" for shard in engine._parts.replica.shards]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_c37_ranks_generate_different_lengths_with_one_gather_of_each_parameter(name: str) -> None:
    ranks = run_ranks(RANKS, generate, name)
    lengths = [numbers[0] for _, numbers, _, _ in ranks]
    assert lengths[1] - lengths[0] == 9
    for same, (_, others), gathers, expected in ranks:
        assert same
        assert others == 0
        assert sorted(gathers) == sorted(expected)


def test_lists_of_blocks_can_be_named() -> None:
    model = CASES["t5"]()
    assert len(find_blocks(model)[1]) == 4
    assert find_blocks(model, "encoder.block,decoder.block") == find_blocks(model)
    assert len(find_blocks(model, "decoder.block")[1]) == 2
    with pytest.raises(zero3d.ConfigError, match="no such module") as caught:
        find_blocks(model, "encoder.block, decoder.blocks")
    assert '"encoder.block, decoder.block"' in caught.value.hint


def test_a_list_of_single_layers_beside_the_blocks_is_none() -> None:
    """Heads may be used in part, by some ranks and not by others."""
    model: Any = CASES["llama"]()
    model.heads = nn.ModuleList(nn.Linear(32, 100) for _ in range(3))
    heads, layers = (sum(one.numel() for one in part.parameters()) for part in (model.heads, model.model.layers))
    assert layers / 4 < heads < layers
    assert find_blocks(model)[0] == "model.layers"
