"""Models from a Transformers folder: which are built and which refused, in one line and with exit code 2."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zero3d.cli.main import app

pytest.importorskip("transformers")

BERT = {
    "model_type": "bert",
    "architectures": ["BertLMHeadModel"],
    "is_decoder": True,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 500,
    "max_position_embeddings": 128,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 128}
LLAMA = {key: value for key, value in BERT.items() if key not in ("architectures", "is_decoder")} | {
    "model_type": "llama"
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
T5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 500}


def plan(folder: Path) -> Any:
    words = ["plan", "--model", str(folder), "--devices", "2", "--device", "CPU", "--sequence", "64", "--top", "1"]
    return CliRunner().invoke(app, [*words, "--json"])


def dryrun(folder: Path, *words: str) -> Any:
    length = ["--set", "data.sequence_length=64"]
    return CliRunner().invoke(app, ["dryrun", "examples/demo.toml", "--model", str(folder), *length, "--json", *words])


def write(folder: Path, told: Any) -> None:
    (folder / "config.json").write_text(json.dumps(told))


def test_positions_of_a_counted_model_are_no_unset_memory(tmp_path: Path) -> None:
    """They were indices out of bounds, others in every run."""
    write(tmp_path, BERT)
    found = plan(tmp_path)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["plans"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (BERT | {"architectures": ["BertForMaskedLM"]}, '"architectures": ["BertForMaskedLM"], which is no causal'),
        (T5 | {"architectures": ["T5ForConditionalGeneration"]}, "which is no causal language model"),
        (T5, '"model_type": "t5", which is no causal language model'),
        ({"model_type": "vit", "hidden_size": 64}, "which is no causal language model"),
        (GPT2 | {"n_head": 0}, "n_head = 0, which must be an integer from 1 on"),
        (GPT2 | {"n_head": 5}, "describes no model that can be built: ValueError: `embed_dim` must be divisible"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers = 0, which"),
        (LLAMA | {"intermediate_size": -128}, "intermediate_size = -128, which"),
        (LLAMA | {"vocab_size": 1 << 40}, "2,147,483,648 is the most"),
        (LLAMA | {"vocab_size": None}, "Field 'vocab_size' expected int"),
        (LLAMA | {"num_attention_heads": 5}, "'validate_architecture': ValueError: The hidden size (64) is not a mult"),
        ([1], "is no JSON object: [1]"),
        ({"hidden_size": 64}, 'has no "model_type"'),
        ({"model_type": "lama"}, "Near names are"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(tmp_path: Path, told: Any, words: str) -> None:
    write(tmp_path, told)
    for found in (plan(tmp_path), dryrun(tmp_path)):
        assert found.exit_code == 2, found.output
        what, hint = [line for line in found.stderr.splitlines() if not line.startswith(("[transf", "planning"))]
        assert what.startswith("zero3d: ") and str(tmp_path / "config.json") in what
        assert words in f"{what}\n{hint}"
        assert "exaone" not in hint


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_experts_are_rehearsed_in_every_dtype(tmp_path: Path, compute: str, capfd: pytest.CaptureFixture[str]) -> None:
    """torch has the shape of grouped products for bf16 alone, and logged a traceback for all others."""
    write(tmp_path, MIXTRAL)
    found = dryrun(tmp_path, "--set", f"precision.compute={compute}")
    assert found.exit_code == 0, found.output
    rank = json.loads(found.stdout)["ranks"][0]
    assert rank["parameters"] > 3 * 4 * 3 * 64 * 128
    tokens, experts, attention, head = 4 * 64, 2 * 3 * 64 * 128, 2 * 64 * (64 + 32), 64 * 500
    products = 6 * tokens * (3 * (experts + attention) + head)
    assert products < rank["flops"] < 1.2 * products, "each token goes to two of four experts"
    assert "Traceback" not in capfd.readouterr().err
