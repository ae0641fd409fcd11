"""Weights from files: what `save_pretrained` writes is what every rank starts from, and reads piece by piece."""

import gc
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zero3d
from tests.ranks.test_building import Peak, own_memory
from tests.ranks.test_transformers import CASES, adamw, batches, loss_of, options_for, part
from tests.world import run_ranks
from zero3d.initial import draw

pytestmark = pytest.mark.ranks

RANKS = 2


def saved(name: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    """Writes a model whose every value, buffers and norms too, is its own; gives these values."""
    torch.manual_seed(9)
    model: Any = CASES[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.save_pretrained(folder, **options)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def start(name: str, folder: Path) -> list[tuple[dict[str, Tensor], list[str]]]:
    found = []
    for level in (0, 3):
        model = zero3d.pretrained(folder, CASES[name])
        engine = zero3d.Engine(model, loss_of(name), adamw, options_for(level))
        verbs = [call.label for call in engine._parts.axis.calls if call.verb == "broadcast"]
        found.append((engine.full_state_dict(), [label for label in verbs if "weights" in label]))
        engine.step(part(batches(name)[0], engine.rank))
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_rank_reads_the_files(tmp_path: Path, name: str) -> None:
    """In shards, with their index (Llama) and in one file, without the tied head (GPT-2). Nothing is broadcast."""
    expected = saved(name, tmp_path, **({"max_shard_size": "20KB"} if name == "llama" else {}))
    assert len(list(tmp_path.glob("*.safetensors"))) > 5 or name == "gpt2"
    for ranks in run_ranks(RANKS, start, name, tmp_path):
        for found, broadcasts in ranks:
            assert not broadcasts
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[key]) for key, value in found.items())


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_saves_comes_right(tmp_path: Path, name: str) -> None:
    """Mixtral's experts are one by one in the file and one tensor in the model; ViT's names differ; T5, BERT and GPT-2
    leave tied weights out. The blueprint makes each parameter by itself, `source()` the whole model."""
    expected = saved(name, tmp_path, max_shard_size="20KB")
    source = zero3d.pretrained(tmp_path, CASES[name])
    blueprint = draw(source, 1)
    assert blueprint.notice == ""
    assert not blueprint.given
    for key in blueprint.values:
        out = torch.empty_like(expected[key])
        blueprint.fill(key, out)
        assert torch.equal(out, expected[key]), key
    whole = source().state_dict()
    assert whole.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in whole.items())


def test_a_base_model_and_one_with_a_head_share_files(tmp_path: Path) -> None:
    """GPT-2's files name "transformer.h.0..." where a head is, "h.0..." where none is."""
    expected = saved("gpt2", tmp_path / "head")
    base = zero3d.pretrained(tmp_path / "head", lambda: transformers.GPT2Model(CASES["gpt2"].config))()
    assert all(torch.equal(value, expected[f"transformer.{key}"]) for key, value in base.state_dict().items())
    base.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    found = zero3d.pretrained(tmp_path / "base", CASES["gpt2"])().state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


class Plain(nn.Module):
    """Of no library, with a tie and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 4)
        self.leave.weight = self.enter.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("computed", torch.ones(2), persistent=False)


def write(folder: Path, **changes: Tensor | None) -> dict[str, Tensor]:
    """The file of a Plain with random values: changed, a tensor more, or one (None) less."""
    tensors = {name: torch.randn_like(value.float()).to(value.dtype) for name, value in Plain().state_dict().items()}
    del tensors["leave.weight"]
    tensors.update({name.replace("__", "."): value for name, value in changes.items()})  # type: ignore[misc]
    found = {name: value for name, value in tensors.items() if value is not None}
    save_file(found, folder / "model.safetensors")
    return found


def test_buffers_ties_and_whatever_is_new(tmp_path: Path) -> None:
    tensors = write(tmp_path, enter__bias=None, computed=torch.zeros(2), extra=torch.ones(1))
    source = zero3d.pretrained(tmp_path, Plain, new=["enter.*"], unused=["extra"])
    blueprint = draw(source, 1)
    buffers = dict(blueprint.model.named_buffers())
    for name in ("table", "norm.running_mean", "norm.num_batches_tracked"):
        assert torch.equal(buffers[name], tensors[name])
    assert buffers["computed"].tolist() == [1, 1]
    filled, drawn = torch.empty(4), torch.empty(4)
    blueprint.fill("enter.bias", filled)
    draw(Plain, 1).fill("enter.bias", drawn)
    assert torch.equal(filled, drawn)


def adapted(model: Any, lora: Any) -> nn.Module:
    wrapped: nn.Module = peft.get_peft_model(model, lora)
    return wrapped


def test_a_lora_adapter_round_weights_from_files(tmp_path: Path) -> None:
    """`adapt` renames parameters; those of the files follow, those it adds begin from the seed."""
    expected = saved("llama", tmp_path)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    source = zero3d.pretrained(tmp_path, CASES["llama"], adapt=lambda model: adapted(model, lora))
    blueprint = draw(source, 1)
    assert blueprint.notice == ""
    names = [name for name in blueprint.values if "lora" not in name]
    assert len(names) == len(expected) < len(blueprint.values)
    for name in blueprint.values:
        out = torch.empty(tuple(blueprint.model.get_parameter(name).shape))
        blueprint.fill(name, out)
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert "lora" in name or torch.equal(out, expected[plain]), name


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"init_lora_weights": "pissa"}], ids=str)
def test_an_adapter_that_computes_with_weights_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """They have no values yet: a copy would be one of other weights, without a word."""
    saved("llama", tmp_path)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], **options)
    source = zero3d.pretrained(tmp_path, CASES["llama"], adapt=lambda model: adapted(model, lora))
    with pytest.raises(zero3d.UsageError, match=r"was used .* by `adapt`"):
        draw(source, 1)


def test_an_adapter_that_drops_weights_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(zero3d.UsageError, match=r"does not have table"):
        draw(zero3d.pretrained(tmp_path, Plain, adapt=lambda model: nn.Linear(2, 2)), 1)


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(zero3d.UsageError) as caught:
        zero3d.pretrained(folder, Plain)()
    assert all(part in str(caught.value) for part in parts), caught.value
    assert caught.value.hint


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    write(tmp_path, norm__bias=None, table=None, other=torch.ones(1))
    refused(tmp_path, "2 tensors of the model are not in the files: table, norm.bias", "fit nothing: other")
    write(tmp_path, enter__bias=torch.ones(5))
    refused(tmp_path, "enter.bias has shape (5,) in the files and (4,) in the model")
    write(tmp_path, leave__weight=torch.ones(4, 4))
    refused(tmp_path, "enter.weight and leave.weight are one parameter in the model and differ in the files")


def test_places_without_weights_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no folder")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "no safetensors file", "not read")
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    refused(tmp_path, "model.safetensors cannot be read")
    write(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}", encoding="utf-8")
    refused(tmp_path, "is no index")
    index.write_text(json.dumps({"weight_map": {"enter.weight": "two.safetensors"}}), encoding="utf-8")
    refused(tmp_path, "two.safetensors cannot be read")
    index.write_text(json.dumps({"weight_map": {"elsewhere": "model.safetensors"}}), encoding="utf-8")
    refused(tmp_path, "has no tensor elsewhere")
    assert set(load_file(tmp_path / "model.safetensors")) >= {"enter.weight"}


WIDTH, LAYERS = 480, 6
MB = 1 << 20
WIDE = transformers.LlamaConfig(
    vocab_size=256, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=8
)


def wide() -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(WIDE)
    return model


def load(folder: Path) -> tuple[int, int]:
    """(bytes that loading took at most beyond this rank's weights, those weights)"""
    source = zero3d.pretrained(folder, wide)
    gc.collect()
    before = own_memory()
    peak = Peak()
    peak.start()
    engine = zero3d.Engine(source, loss_of("llama"), adamw, {"zero": {"level": 3}})
    peak.over.set()
    peak.join()
    weights = engine.held_bytes()["weights"][engine.rank]
    return peak.most - before - weights, weights


def test_no_rank_holds_the_whole_model_while_it_is_loaded(tmp_path: Path) -> None:
    """56 MB in 6 blocks of 9 MB: beside its shards a rank needs room for two of them, being made and being cut."""
    [model] = run_ranks(1, write_wide, tmp_path)
    block = model / LAYERS
    for extra, weights in run_ranks(RANKS, load, tmp_path):
        assert weights < 1.01 * model / RANKS
        assert extra < 2.5 * block < model / 2, (extra / MB, weights / MB, model / MB)


def write_wide(folder: Path) -> int:
    model: Any = wide()
    model.save_pretrained(folder, max_shard_size="20MB")
    return sum(parameter.nbytes for parameter in model.parameters())
