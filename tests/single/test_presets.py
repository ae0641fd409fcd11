"""From [model] to the function that builds it; what is wrong is said with what would work."""

from pathlib import Path

import pytest
import torch
from torch import nn

from zero3d import config_checks
from zero3d.config import Config, Model
from zero3d.errors import ConfigError
from zero3d.models.gpt import GPT
from zero3d.models.llama import Llama
from zero3d.models.presets import PRESETS, build_function

CODE = """
import torch
from torch import nn

LIMIT = 3

def plain():
    return nn.Linear(2, 2)

def sized(vocabulary, *, sequence_length=8, width=4):
    model = nn.Embedding(vocabulary, width)
    model.sequence_length = sequence_length
    return model

def needs(depth):
    return nn.Linear(depth, depth)

def wrong():
    return {"model": 1}

class Family:
    @staticmethod
    def small():
        return nn.Linear(1, 1)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module that only the current folder has; another for each test, as Python remembers them."""
    name = f"code_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(CODE)
    (tmp_path / f"{name}_broken.py").write_text("import torch\nraise RuntimeError('no licence')\n")
    (tmp_path / f"{name}_lacks.py").write_text("import surely_not_installed\n")
    monkeypatch.chdir(tmp_path)
    return name


def built(path: str) -> nn.Module:
    return build_function(Model(path=path), 100, 32, allow_code=True)()


def refusal(path: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        built(path)
    assert path in caught.value.message
    return caught.value


def test_gpt_gets_its_shape_from_the_configuration() -> None:
    model = Model(width=24, layers=3, heads=2, dropout=0.1, tied=False)
    gpt = build_function(model, 100, 32)()
    assert isinstance(gpt, GPT) and len(gpt.blocks) == 3
    assert gpt(torch.zeros(1, 32, dtype=torch.long)).shape == (1, 32, 100)
    assert gpt.config.dropout == 0.1 and gpt.head.weight is not gpt.embedding.weight


def test_llama_gets_its_shape_from_the_configuration() -> None:
    model = Model(preset="llama", width=24, layers=3, heads=4, kv_heads=2, mlp_width=40, dropout=0.1, tied=True)
    llama = build_function(model, 100, 32)()
    assert isinstance(llama, Llama) and len(llama.blocks) == 3
    assert llama(torch.zeros(1, 32, dtype=torch.long)).shape == (1, 32, 100)
    assert llama.config.dropout == 0.1 and llama.head.weight is llama.embedding.weight
    block = llama.blocks[0]
    assert block.attention.q.weight.shape == (24, 24) and block.attention.k.weight.shape == (12, 24)
    assert block.mlp.gate.weight.shape == block.mlp.up.weight.shape == (40, 24)


def test_keys_left_out_are_as_usual_for_the_preset() -> None:
    gpt, llama = (build_function(Model(preset=preset, width=192), 100, 32)() for preset in ("gpt", "llama"))
    assert isinstance(gpt, GPT) and gpt.head.weight is gpt.embedding.weight
    assert isinstance(llama, Llama) and llama.head.weight is not llama.embedding.weight
    assert llama.blocks[0].attention.v.weight.shape == (192, 192)
    assert llama.blocks[0].mlp.up.weight.shape == (512, 192)
    assert build_function(Model(preset="llama", width=194, heads=1), 100, 32)().config.inner_width == 576


def test_presets_that_are_checked_are_those_that_can_be_built() -> None:
    assert tuple(PRESETS) == config_checks.PRESETS


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no preset 'gtp'") as caught:
        build_function(Model(preset="gtp"), 100, 32)
    assert "'gpt'" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        build_function(Model(preset=None), 100, 32)
    assert "gpt" in caught.value.hint


@pytest.mark.parametrize(
    ("sizes", "message", "hint"),
    [
        ({"width": 24, "heads": 5}, "width = 24 does not divide into model.heads = 5", "fit: 4 or 6."),
        ({"width": 9, "heads": 3}, "width = 9 does not divide into model.heads = 3", "Set an even model.width."),
        ({"preset": "llama", "width": 24, "heads": 5}, "does not divide into model.heads = 5", "fit: 4 or 6."),
        (
            {"preset": "llama", "heads": 4, "kv_heads": 3},
            "model.heads = 4 does not divide into model.kv_heads = 3",
            "KV heads that fit: 1 or 2 or 4.",
        ),
        ({"preset": "llama", "heads": 4, "kv_heads": 8}, "model.kv_heads = 8", "KV heads that fit: 1 or 2 or 4."),
        ({"kv_heads": 2}, "model.kv_heads = 2 means nothing to model.preset = 'gpt'", '"llama"'),
        ({"mlp_width": 99}, "model.mlp_width = 99 means nothing to model.preset = 'gpt'", '"llama"'),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(sizes: object, message: str, hint: str) -> None:
    """By the configuration, before anything is built."""
    with pytest.raises(ConfigError) as caught:
        Config.load({"model": sizes})
    assert message in caught.value.message and hint in caught.value.hint


def test_code_is_run_only_when_allowed(package: str) -> None:
    with pytest.raises(ConfigError, match="runs code") as caught:
        build_function(Model(path=f"{package}_broken:plain"), 100, 32)
    assert "--allow-code" in caught.value.hint


def test_functions_are_found_in_the_current_folder(package: str) -> None:
    assert isinstance(built(f"{package}:plain"), nn.Linear)
    assert isinstance(built(f"{package}:Family.small"), nn.Linear)


def test_functions_get_the_sizes_that_they_ask_for(package: str) -> None:
    model = built(f"{package}:sized")
    assert model.num_embeddings == 100 and model.sequence_length == 32 and model.embedding_dim == 4


def test_what_is_missing_or_wrong_is_named(package: str) -> None:
    assert "no module 'no_such_package'" in refusal("no_such_package.models:build").message
    assert "has no 'plian'" in (error := refusal(f"{package}:plian")).message and "'plain'" in error.hint
    assert refusal(f"{package}.plain").hint == 'write "package.module:function"'
    assert "LIMIT is a int, no function" in refusal(f"{package}:LIMIT").message
    assert "returned dict, no nn.Module" in refusal(f"{package}:wrong").message
    assert "needs 'depth'" in (error := refusal(f"{package}:needs")).message
    assert "vocabulary and sequence_length" in error.hint


def test_errors_of_the_imported_code_are_told(package: str) -> None:
    assert "RuntimeError: no licence" in refusal(f"{package}_broken:plain").message
    assert "No module named 'surely_not_installed'" in refusal(f"{package}_lacks:plain").message
