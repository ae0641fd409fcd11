"""Tensor parallelism of Transformers models, unedited, by the plans that they ship: beside a plain loop.

Close (1e-5 in fp32): the plain loop in one process. Bit-equal: all ranks, and what is written and read again. Whole
tensors have the names and shapes of the model that nobody cut (C19).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import zero3d
from tests import reference
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

STEPS, SAMPLES, LENGTH, VOCABULARY, CLIP = 2, 4, 8, 61, 0.5
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = transformers.GPT2Config(
    vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    bos_token_id=1, eos_token_id=2
)  # fmt: skip
CONFIGS = {
    "gpt2": GPT2,
    "llama": transformers.LlamaConfig(**DECODER),
    "qwen2": transformers.Qwen2Config(**DECODER, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**DECODER, head_dim=8),
    "mixtral": transformers.MixtralConfig(**DECODER, num_local_experts=3, num_experts_per_tok=2),
}
CUT = {
    "gpt2": "transformer.h.1.attn.c_attn.weight",
    "llama": "model.layers.1.self_attn.k_proj.weight",
    "qwen2": "model.layers.1.self_attn.q_proj.bias",
    "qwen3": "model.layers.1.mlp.down_proj.weight",
    "mixtral": "model.layers.1.mlp.experts.gate_up_proj",
}
"""A parameter of each that is cut."""


@dataclass(frozen=True)
class Run:
    dp: int
    tp: int
    sequence: bool
    level: int

    def options(self) -> dict[str, Any]:
        return {
            "parallel": {"tp": self.tp, "sequence_parallel": self.sequence, "micro_batch": 2},
            "zero": {"level": self.level},
            "optimizer": {"clip_norm": CLIP},
        }


RUNS = [Run(1, 2, False, 0), Run(1, 2, True, 2), Run(2, 2, False, 3), Run(2, 2, True, 3), Run(2, 2, True, 1)]
WIDE = [Run(1, 4, False, 1), Run(1, 4, True, 3)]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]))
    return model


def batches(steps: int = STEPS) -> list[dict[str, Tensor]]:
    """The ends of some texts are padding."""
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        tokens = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        mask = torch.ones_like(tokens)
        mask[1, 6:] = mask[3, 4:] = 0
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)})
    return found


def loss(output: Any, batch: dict[str, Tensor]) -> Any:
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # A gradient that is zero but for rounding, as of keys' biases, must not become a step of full size.
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)


def part(batch: dict[str, Tensor], engine: zero3d.Engine) -> dict[str, Tensor]:
    return {key: value.chunk(engine.dp_size)[engine.dp_index] for key, value in batch.items()}


def engine_for(name: str, run: Run) -> zero3d.Engine:
    return zero3d.Engine(made(name), loss, adamw, run.options())


@dataclass
class Trace:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    tied: bool


def train(name: str, runs: Sequence[Run]) -> list[Trace]:
    return [train_one(name, run) for run in runs]


def train_one(name: str, run: Run) -> Trace:
    engine = engine_for(name, run)
    reports = [engine.step(part(batch, engine)) for batch in batches()]
    model: Any = engine.model
    return Trace(
        [one.loss for one in reports],
        [one.grad_norm for one in reports],
        engine.full_state_dict(),
        {one.name: engine.grad_of(one.name) for one in engine.parameters},
        model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    )


@cache
def plain(name: str) -> reference.Trace:
    [found] = run_ranks(1, in_one_process, name)
    trace: reference.Trace = found
    return trace


def in_one_process(name: str) -> reference.Trace:
    steps = [
        [{key: value[first : first + 2] for key, value in batch.items()} for first in (0, 2)] for batch in batches()
    ]
    return reference.train(made(name), loss, adamw, steps, call=lambda model, batch: model(**batch), clip=CLIP)


def distance(mine: Tensor, other: Tensor) -> float:
    return float((mine - other).abs().max())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("runs", [RUNS[:2], RUNS[2:], WIDE], ids=["1x2", "2x2", "1x4"])
def test_they_train_as_the_plain_loop(name: str, runs: list[Run]) -> None:
    ranks = run_ranks(runs[0].dp * runs[0].tp, train, name, runs, timeout=180)
    expected, model = plain(name), made(name)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    largest = max(float(one.abs().max()) for one in expected.gradients.values() if one is not None)
    for number, run in enumerate(runs):
        trace = ranks[0][number]
        torch.testing.assert_close(trace.losses, expected.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(trace.norms, expected.norms, rtol=1e-5, atol=0)
        assert {key: tuple(value.shape) for key, value in trace.weights.items()} == shapes, run
        assert {value.dtype for value in trace.weights.values()} == {torch.float32}
        for key, value in trace.weights.items():
            scale = max(float(expected.weights[key].abs().max()), 0.02)
            assert distance(value, expected.weights[key]) <= 1e-5 * scale, (run, key)
        assert trace.gradients.keys() == expected.gradients.keys()
        for key, value in trace.gradients.items():
            gradient = expected.gradients[key]
            assert gradient is not None
            # Keys' biases have no gradient but rounding.
            bound = 1e-5 * float(gradient.abs().max()) if "k_proj.bias" not in key else 1e-6 * largest
            assert distance(value, gradient) <= max(bound, 1e-7 * largest), (run, key)
        assert trace.tied == CONFIGS[name].tie_word_embeddings
        for found in ranks:
            same = found[number]
            assert (same.losses, same.norms) == (trace.losses, trace.norms), run
            assert all(torch.equal(value, trace.weights[key]) for key, value in same.weights.items()), run
    assert distance(expected.weights[CUT[name]], model.state_dict()[CUT[name]]) > 1e-3, "nothing was trained"


def generate(name: str, run: Run) -> bool:
    """Whether generating equals that of a plain model of the same weights, and training goes on after it."""
    engine = engine_for(name, run)
    first, second = batches()
    engine.step(part(first, engine))
    whole: Any = made(name)
    whole.load_state_dict(engine.full_state_dict())
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    prompt = torch.tensor([[5, 6, 7 + engine.rank]])
    with engine.gathered() as model:
        found = model.generate(prompt, **options)
    report = engine.step(part(second, engine))
    torch.testing.assert_close(report.loss, plain(name).losses[1], rtol=1e-5, atol=0)
    return torch.equal(found, whole.eval().generate(prompt, **options))


def read_and_write(name: str, run: Run) -> None:
    """What is written to is read again, whole, and trains on."""
    engine = engine_for(name, run)
    first, second = batches()
    engine.step(part(first, engine))
    key, state = CUT[name], engine.full_state_dict()
    assert torch.equal(engine.weight_of(key), state[key])
    value = torch.full_like(state[key][1:3], 0.25) + engine.rank  # rank 0's counts
    engine.set_weight(key, value, slice(1, 3))
    assert bool((engine.weight_of(key, slice(1, 3)) == 0.25).all())
    assert torch.equal(engine.weight_of(key, slice(3, None)), state[key][3:])
    assert torch.equal(engine.grad_of(key, slice(1, 3)), engine.grad_of(key)[1:3])
    changed = engine.full_state_dict()
    assert [one for one in state if not torch.equal(state[one], changed[one])] == [key]
    with engine.gathered(write=True) as model:
        model.get_parameter(key).mul_(2)
    assert torch.equal(engine.weight_of(key), 2 * changed[key])
    with engine.gathered() as model:
        assert torch.equal(model.get_parameter(key), 2 * changed[key])
    loaded = {one: value + 0.01 for one, value in made(name).state_dict().items()}
    engine.load_state_dict(loaded)
    assert all(torch.equal(value, loaded[one]) for one, value in engine.full_state_dict().items())
    evaluated = engine.evaluate(part(second, engine))
    whole = made(name).eval()
    whole.load_state_dict(loaded)
    total, count = loss(whole(**second), second)
    torch.testing.assert_close(evaluated.loss, float(total / count), rtol=1e-5, atol=0)
    assert evaluated.tokens == int(count)
    report = engine.step(part(second, engine))
    torch.testing.assert_close(report.loss, evaluated.loss, rtol=1e-6, atol=0)


def edited(name: str, run: Run) -> dict[str, dict[str, Tensor]]:
    """Weights after steps between which nothing, or a parameter's training, is edited."""
    found, key = {}, CUT[name]
    for what in ("as it is", "edited", "frozen for a step"):
        engine = engine_for(name, run)
        first, second = (part(batch, engine) for batch in batches())
        engine.step(first)
        if what == "edited":
            engine.edit(lambda model: None)
        elif what == "frozen for a step":
            engine.edit(lambda model: model.get_parameter(key).requires_grad_(False))
            before = engine.weight_of(key)
            engine.step(second)
            assert torch.equal(engine.weight_of(key), before)
            engine.edit(lambda model: model.get_parameter(key).requires_grad_(True))
        engine.step(second)
        found[what] = engine.full_state_dict()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_used_as_plain_models(name: str) -> None:
    run = Run(1, 2, name in ("llama", "gpt2"), 3 if name in ("qwen2", "llama") else 2)
    assert run_ranks(2, generate, name, run, timeout=120) == [True, True]
    run_ranks(2, read_and_write, name, run, timeout=120)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_edits_keep_what_they_leave_alone(name: str) -> None:
    """Bit-equal: a run with an edit that changes nothing, so the optimizer's state is kept. Close: the same on one
    rank, where nothing is cut."""
    [expected] = run_ranks(1, edited, name, Run(1, 1, False, 0))
    for found in run_ranks(4, edited, name, Run(2, 2, True, 3), timeout=120):
        assert all(torch.equal(value, found["as it is"][key]) for key, value in found["edited"].items())
        for what, weights in found.items():
            for key, value in weights.items():
                scale = max(float(expected[what][key].abs().max()), 0.02)
                assert distance(value, expected[what][key]) <= 1e-5 * scale, (what, key)
        assert not torch.equal(found["frozen for a step"][CUT[name]], found["as it is"][CUT[name]])
