"""Rehearsals of worlds that are not here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import zero3d
from tests.rehearsed import MODELS
from zero3d.cli.main import app
from zero3d.config import Config
from zero3d.dryrun.ledger import KINDS, Life, peak
from zero3d.dryrun.run import Job, rehearse
from zero3d.errors import UsageError
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.tensor.loss import next_token_loss

STATES = ("weights", "gradients", "optimizer")
PAPER = ("precision.compute=fp16", "precision.gradients=compute", "parallel.micro_batch=1")


def job(model: nn.Module | Any, world: int, *settings: str, loss: Any = next_token_loss, batch: Any = None) -> Job:
    tokens = torch.zeros(1, 8, dtype=torch.long)
    return Job(
        source=model,
        loss=loss,
        optimizer="adamw",
        config=Config.load({"data": {"global_batch": world}}, settings).resolved(world, native_bf16=True),
        batch={"tokens": tokens, "targets": tokens} if batch is None else batch,
    )


def gpt(width: int, layers: int, vocabulary: int = 256) -> Any:
    config = GPTConfig(vocabulary=vocabulary, sequence_length=8, width=width, layers=layers, heads=width // 128)
    return lambda: GPT(config)


@pytest.mark.parametrize(("level", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_states_of_7_5_billion_on_64_ranks_are_the_paper_s(level: int, gigabytes: float) -> None:
    """Figure 1 of ZeRO (Rajbhandari et al. 2020), by a real model: 37 blocks of width 4096 have 7.45e9 parameters."""
    found = rehearse(job(gpt(4096, 37), 64, f"zero.level={level}", *PAPER))
    (rank,) = found.ranks
    states = sum(rank.peak.by_kind[kind] for kind in STATES) * 7.5e9 / rank.parameters
    assert states / 1e9 == pytest.approx(gigabytes, rel=0.003)
    assert found.world == 64


def test_states_of_gpt2_with_1_5_billion() -> None:
    """3 GB of fp16 weights, 24 GB of states (ZeRO, section 3.1)."""
    (rank,) = rehearse(job(gpt(1600 // 128 * 128 + 128, 44), 1, "zero.level=0", *PAPER)).ranks
    scale = 1.5e9 / rank.parameters
    assert rank.peak.by_kind["weights"] * scale / 1e9 == pytest.approx(3.0, rel=0.001)
    assert sum(rank.peak.by_kind[kind] for kind in STATES) * scale / 1e9 == pytest.approx(24.0, rel=0.001)


def test_roles_are_rehearsed_and_only_as_many_micro_batches_as_are_needed() -> None:
    settings = ("parallel.pp=4", "parallel.tp=2", "parallel.micro_batch=1", "zero.level=1")
    long = Config.load({"data": {"global_batch": 64 * 4}}, settings).resolved(32, native_bf16=True)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    whole = Job(
        source=gpt(256, 8),
        loss=next_token_loss,
        optimizer="adamw",
        config=long,
        batch={"tokens": tokens, "targets": tokens},
    )
    found = rehearse(whole)
    assert [rank.rank for rank in found.ranks] == [0, 16, 24]
    assert found.micro_batches == 64
    assert found.rehearsed < 10
    few = rehearse(whole, micro_batches=found.rehearsed)
    more = rehearse(whole, micro_batches=found.rehearsed + 1)
    for rank, some, others in zip(found.ranks, few.ranks, more.ranks):
        assert rank.peak.by_kind == some.peak.by_kind
        step = others.flops - some.flops
        assert rank.flops == some.flops + step * (64 - found.rehearsed)
        for axis in ("tp", "pp"):
            slope = others.traffic[axis].sent - some.traffic[axis].sent
            assert rank.traffic[axis].sent == some.traffic[axis].sent + slope * (64 - found.rehearsed)
            for verb, number in rank.traffic[axis].calls.items():
                slope = others.traffic[axis].calls[verb] - some.traffic[axis].calls[verb]
                assert number == some.traffic[axis].calls[verb] + slope * (64 - found.rehearsed), verb
        assert {"send", "recv"} <= set(rank.traffic["pp"].calls)
        assert rank.traffic["dp"].sent == some.traffic["dp"].sent
    assert found.bubble == pytest.approx(3 / 64, rel=0.5)


def test_nothing_large_is_made(tmp_path: Path) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (rank,) = rehearse(job(gpt(4096, 24), 512, "zero.level=3", *PAPER)).ranks
    assert rank.parameters > 4.8e9
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 1e9


class Looks(nn.Module):
    """Takes one way or the other by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = x * 2
        return x


class Picks(Looks):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x[x.sum(dim=1) > 0])


class Fails(Looks):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x.view(-1, 3))


@pytest.mark.parametrize(
    ("model", "told"),
    [(Looks, "test_dryrun.py:"), (Picks, "aten::index"), (Fails, "raised RuntimeError: shape")],
)
def test_a_way_that_hangs_on_values_is_refused(model: type[nn.Module], told: str) -> None:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return output.sum(), 1

    x = torch.zeros(4, 8)
    with pytest.raises(UsageError, match="cannot be rehearsed") as error:
        rehearse(job(model, 2, loss=loss, batch=(x, x)))
    assert told in str(error.value)


def test_one_stage_that_fails_ends_all() -> None:
    class FailsLate(Looks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for at, block in enumerate(self.blocks):
                x = block(x)
                if at == 2:
                    x = x.view(-1, 3)
            return x

    x = torch.zeros(4, 8)
    with pytest.raises(UsageError, match="the model or its loss raised RuntimeError: shape"):
        rehearse(job(FailsLate, 4, "parallel.pp=4", loss=lambda output, batch: (output.sum(), 1), batch=(x, x)))


def test_a_peak_is_the_sum_of_what_lives_then() -> None:
    lives = [
        Life(5, birth=1, where="blocks.0.up", action="F0.0", death=6),
        Life(7, birth=2, where="blocks.0", action="F0.0", death=3),
        Life(4, birth=4, where="head", action="B0.0"),
        Life(100, birth=5, where="", action="", kind="optimizer"),
        Life(2, birth=7, where="", action="", death=8),
    ]
    found = peak(lives, {"weights": 10, "optimizer": 100, "host": 1000})
    assert found.total == 110 + 12
    assert found.by_kind == {"weights": 10, "gradients": 0, "optimizer": 100, "activations": 12, "buffers": 0}
    assert found.modules == {"blocks.0": 12}
    assert found.action == "F0.0"
    assert found.actions == [("F0.0", 122), ("B0.0", 119), ("the update", 116)]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["dryrun", *words])


def test_the_verb_tells_people_and_programs(tmp_path: Path) -> None:
    out = tmp_path / "dryrun.json"
    told = run("examples/3d.toml", "--json", "--out", str(out))
    assert told.exit_code == 0
    event = json.loads(told.stdout)
    assert event == json.loads(out.read_text())
    assert event["world"] == 8
    assert [one["rank"] for one in event["ranks"]] == [0, 4]
    for one in event["ranks"]:
        assert set(one["peak_by_kind"]) == set(KINDS)
        assert one["peak_bytes"] == sum(one["peak_by_kind"].values())
        assert one["sent_bytes"].keys() == {"dp", "tp", "pp"}
        assert one["flops"] > 0
    assert 0 < event["bubble"] < 1
    wider = run("examples/3d.toml", "--json", "--vocabulary", "512")
    parameters = [json.loads(one.stdout)["ranks"][0]["parameters"] for one in (told, wider)]
    assert parameters[1] - parameters[0] == (512 - 256) * 64 // 2  # an embedding of width 64, cut over tp = 2
    shown = run("examples/3d.toml", "--rank", "5")
    assert shown.exit_code == 0
    assert "rank 5" in shown.stdout
    assert "all-reduce" in shown.stdout
    assert 'Vocabulary of 256, that of data.tokenizer = "bytes"; --vocabulary rehearses another.' in shown.stdout
    twice = run("examples/3d.toml", "--rank", "5", "--rank", "5", "--vocabulary", "512")
    assert twice.stdout.count("rank 5") == shown.stdout.count("rank 5")
    assert "Vocabulary" not in twice.stdout
    alone = run("examples/demo.toml", "--set", "parallel.dp=1")
    assert "a step on 1 rank:" in alone.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["examples/3d.toml", "--rank", "8"], "there are 8 ranks"),
        (["examples/3d.toml", "--world", "12"], "12"),
        (["examples/none.toml"], "examples/none.toml"),
        (["examples/demo.toml", "--model", "/nowhere"], "cannot be read"),
        (["examples/3d.toml", "--vocabulary", "999999999999"], "2,147,483,648 is the most"),
        (["examples/3d.toml", "--set", "data.sequence_length=99999999999"], "at most 16777216"),
        (["examples/3d.toml", "--micro-batches", "1000000000000"], "micro_batches"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], told: str) -> None:
    found = run(*words)
    assert found.exit_code == 2
    assert told in found.stderr


def test_code_that_a_file_names_is_run_only_when_it_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[model]\npath = "tests.rehearsed:gpt"\n[data]\nsequence_length = 64\n')
    refused = run(str(file))
    assert refused.exit_code == 2
    assert "--allow-code" in refused.stderr
    found = run(str(file), "--allow-code", "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["ranks"][0]["parameters"] > 1e6


def test_a_folder_s_config_is_enough(tmp_path: Path) -> None:
    config = MODELS["hf"].build().config
    config.save_pretrained(tmp_path)
    found = run("examples/demo.toml", "--model", str(tmp_path), "--set", "data.sequence_length=32", "--json")
    assert found.exit_code == 0, found.stderr
    (rank,) = json.loads(found.stdout)["ranks"]
    assert rank["parameters"] == sum(one.numel() for one in MODELS["hf"].build().parameters())
    told = json.loads((tmp_path / "config.json").read_text())
    for wrong, words in (
        ({"model_type": "lama"}, "llama"),
        ({"hidden_size": None}, "hidden_size"),
        ({"max_position_embeddings": 16}, "up to 16 tokens"),
    ):
        changed = {key: value for key, value in (told | wrong).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        found = run("examples/demo.toml", "--model", str(tmp_path), "--set", "data.sequence_length=32")
        assert found.exit_code == 2
        assert words in found.stderr


def test_any_module_is_rehearsed_from_python() -> None:
    model = MODELS["mlp"]
    found = zero3d.rehearse(
        model.build, model.loss, "adamw", {"zero": {"level": 3}}, batch=model.batch(4), world=64, ranks=[63]
    )
    (rank,) = found.ranks
    assert (found.world, rank.rank) == (64, 63)
    with pytest.raises(UsageError, match="no rank 64"):
        zero3d.rehearse(model.build, model.loss, batch=model.batch(4), world=64, ranks=[64])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        *(({"world": world}, "world = ") for world in (0, -1, 1.5, float("nan"), "4", True, 10**12)),
        *(({"micro_batches": number}, "micro_batches = ") for number in (0, -1, 1.5, 10**12)),
        *(({"ranks": ranks}, "ranks = ") for ranks in (3, [0.5], "0")),
        *(({"config": config}, "config = ") for config in (3, [1])),
        ({"loss": None}, "loss = None"),
        *(({"batch": batch}, "no tensor with elements") for batch in ({}, torch.zeros(0, 96), None)),
    ],
)
def test_arguments_are_checked_before_any_work(wrong: dict[str, Any], told: str) -> None:
    def build() -> nn.Module:
        raise AssertionError("built")

    model = MODELS["mlp"]
    given = {"loss": model.loss, "batch": model.batch(4), "world": 2} | wrong
    with pytest.raises(UsageError, match=told) as error:
        zero3d.rehearse(build, **given)
    assert error.value.hint


class Raises(Looks):
    """What its own code raises, whatever kind it is of."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [OSError("no such file"), KeyError("a key"), AssertionError(), ValueError("first:\n  second"), TypeError("a type")],
    ids=repr,
)
def test_whatever_a_model_raises_is_told_whole_with_its_place(error: Exception) -> None:
    """Some kinds came through raw, the others were cut after a line and said to hang on values."""
    with pytest.raises(UsageError, match="the model or its loss raised " + type(error).__name__) as found:
        zero3d.rehearse(lambda: Raises(error), lambda output, batch: output.sum(), batch=torch.zeros(4, 8), world=2)
    assert " ".join(str(error).split()) in found.value.message and "\n" not in found.value.message
    assert found.value.where.startswith("test_dryrun.py:") and found.value.where.endswith(" in forward")
    assert "values" not in found.value.hint and "--debug" not in str(found.value)
    assert found.value.__cause__ is error


def test_memory_that_is_asked_for_is_a_value_that_is_needed() -> None:
    class Leaves(Looks):
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(self.blocks[0](x).detach().numpy())

    with pytest.raises(UsageError, match="a value is needed") as found:
        zero3d.rehearse(Leaves, lambda output, batch: output.sum(), batch=torch.zeros(4, 8), world=2)
    assert "Where it must depend on values" in found.value.hint
