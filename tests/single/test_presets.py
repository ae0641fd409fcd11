"""From [model] to the function that builds it; what is wrong is said with what would work."""

from pathlib import Path

import pytest
import torch
from torch import nn

from zero3d.config import Model
from zero3d.errors import ConfigError
from zero3d.models.gpt import GPT
from zero3d.models.presets import build_function

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


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no preset 'gtp'") as caught:
        build_function(Model(preset="gtp"), 100, 32)
    assert "'gpt'" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        build_function(Model(preset=None), 100, 32)
    assert "gpt" in caught.value.hint


def test_heads_that_do_not_divide_the_width_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="width = 24 cannot be split into 5 heads") as caught:
        build_function(Model(width=24, heads=5), 100, 32)
    assert caught.value.hint == "heads that work: 1, 2, 3, 4, 6, 12"
    with pytest.raises(ConfigError) as caught:
        build_function(Model(width=9, heads=3), 100, 32)
    assert caught.value.hint == "the width must be even"


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
