"""`zero3d convert-config`: DeepSpeed configurations as people have them become configurations that zero3d accepts, and
of each of their keys is said what became of it."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zero3d.cli.main import app
from zero3d.config import Config
from zero3d.errors import UsageError
from zero3d.moving.deepspeed import convert

TRAINER: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
"""As the documentation of a trainer has it: most is left to the program."""
BY_HAND: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 2000, "warmup_num_steps": 100, "cos_min_ratio": 0.1, "warmup_type": "linear"},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8},
    "activation_checkpointing": {"partition_activations": True},
}
NVME: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "fast/disk", "ratio": 0.5, "buffer_count": 4},
        "offload_param": {"device": "nvme", "nvme_path": "fast/disk"},
        "zero_quantized_weights": True,
    },
    "aio": {"block_size": 1048576},
}
FILES = {"trainer": TRAINER, "by hand": BY_HAND, "nvme": NVME, "empty": {}}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dp", [None, 4])
def test_what_comes_out_is_a_configuration(name: str, dp: int | None) -> None:
    """And each key is in one of the three lists, or says the same as not to be there."""
    found = convert(FILES[name], dp=dp)
    config = Config.load(found.tree)
    assert Config.load(tomllib.loads(config.to_toml())) == config
    assert all(one.why for one in (*found.left_out, *found.open))


def test_values_are_theirs() -> None:
    config = Config.load(convert(BY_HAND).tree)
    assert (config.zero.level, config.zero.overlap, config.recompute.mode) == (2, False, "block")
    assert (config.data.global_batch, config.parallel.micro_batch, config.parallel.dp) == (64, 4, 4)
    assert (config.precision.compute, config.run.steps, config.run.log_every) == ("fp16", 2000, 10)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.betas, optimizer.eps) == ("adamw", 3e-4, (0.9, 0.95), 1e-8)
    assert (optimizer.clip_norm, optimizer.weight_decay, optimizer.warmup) == (1.0, 0.1, 100)
    assert (optimizer.schedule, optimizer.final_lr) == ("cosine", 0.1)


def test_the_step_is_resolved_as_theirs() -> None:
    """Micro-batches of a rank are their accumulation."""
    config = Config.load(convert(BY_HAND).tree).resolved(world=4, native_bf16=True)
    assert config.micro_batches == BY_HAND["gradient_accumulation_steps"]


def test_homes_are_theirs() -> None:
    both = Config.load(convert(TRAINER).tree).offload
    assert (both.optimizer, both.parameters) == ("host", "host")
    found = convert(NVME)
    disk = Config.load(found.tree).offload
    assert (disk.optimizer, disk.folder, disk.parameters, disk.fraction) == ("disk", "fast/disk", "host", 0.5)
    lost = {one.theirs for one in found.left_out if one.needed}
    assert {"zero_optimization.offload_param.nvme_path", "zero_optimization.zero_quantized_weights"} <= lost


def test_auto_is_listed_with_our_key_and_what_stands() -> None:
    open_ = {one.ours: one.why for one in convert(TRAINER).open}
    assert {"optimizer.lr", "optimizer.betas", "precision.compute", "run.steps", "data.global_batch"} <= set(open_)
    assert "0.001" in open_["optimizer.lr"]


@pytest.mark.parametrize("name", FILES)
def test_no_key_is_dropped_without_a_word(name: str) -> None:
    """Each is named in one of the lists, or says what is so here without a key: a dynamic loss scale, and zeros."""
    found = convert(FILES[name])
    told = " ".join(one[0] for one in (*found.taken, *found.left_out, *found.open))
    sums = {"batch ": "train_batch_size", "accumulation": "gradient_accumulation_steps"}
    told += " ".join(key for word, key in sums.items() if word in told)
    silent = {path for path in flat(FILES[name]) if path not in told}
    assert silent <= {"fp16.loss_scale", "scheduler.params.warmup_type"}


def flat(tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield from flat(value, f"{above}{key}.") if isinstance(value, dict) else [f"{above}{key}"]


def test_what_is_not_set_is_as_there() -> None:
    """Without a stage nothing is sharded, without bf16 and fp16 all is fp32, Adam's betas are DeepSpeed's."""
    config = Config.load(convert({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}).tree)
    assert (config.zero.level, config.precision.compute, config.optimizer.betas) == (0, "fp32", (0.9, 0.999))
    assert config.optimizer.weight_decay == 0.0


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 4}}}, "optimizer.type"),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, "optimizer.params.momentum"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}, "scheduler.type"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, "scheduler.params.warmup_type"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale"),
        (
            {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device",
        ),
        ({"compression_training": {"weights": {"bits": 4}}}, "compression_training.weights.bits"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation.stage"),
    ],
)
def test_what_has_no_equal_is_listed(settings: dict[str, Any], key: str) -> None:
    found = convert(settings)
    Config.load(found.tree)
    assert key in {one.theirs for one in found.left_out if one.needed}


@pytest.mark.parametrize(
    ("settings", "dp", "words"),
    [
        ({**BY_HAND, "train_batch_size": 65}, None, ["65", "4 x 4", "16"]),
        ({**BY_HAND}, 3, ["64", "4 x 4 x 3", "48"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, None, ["both"]),
        ({"zero_optimization": {"stage": "three"}}, None, ["zero_optimization.stage", "three"]),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "tpu"}}}, None, ["tpu", "cpu, nvme"]),
    ],
)
def test_what_contradicts_itself_is_refused(settings: dict[str, Any], dp: int | None, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        convert(settings, dp=dp)
    assert all(word in str(caught.value) for word in words) and caught.value.hint


def test_a_long_warm_up_without_a_number_of_steps_guesses_one_and_says_so() -> None:
    found = convert({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 500, "warmup_type": "linear"}}})
    assert Config.load(found.tree).run.steps == 5000
    assert "run.steps" in {one.ours for one in found.open}


def test_the_command_writes_a_file_that_train_reads(tmp_path: Path) -> None:
    source, out = tmp_path / "ds.json", tmp_path / "run.toml"
    source.write_text(json.dumps(TRAINER))
    words = ["convert-config", str(source), "--out", str(out), "--set", "optimizer.lr=2e-4"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    config = Config.load(out)
    assert (config.zero.level, config.optimizer.lr, config.offload.optimizer) == (3, 2e-4, "host")
    text = out.read_text()
    assert "from zero_optimization.stage" in text and "# optimizer.betas" in text and "# optimizer.lr" not in text
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and out.read_text() == text


def test_json_is_one_object(tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text(json.dumps(BY_HAND))
    done = CliRunner().invoke(app, ["convert-config", str(source), "--json"])
    told = json.loads(done.stdout)
    assert told["config"]["zero"]["level"] == 2
    assert {"theirs": "zero_optimization.stage", "ours": "zero.level", "value": 2} in told["taken"]
    assert Config.load(told["config"]).optimizer.schedule == "cosine"


@pytest.mark.parametrize("text", ["[1]", "{", None])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str | None) -> None:
    source = tmp_path / "ds.json"
    if text is not None:
        source.write_text(text)
    done = CliRunner().invoke(app, ["convert-config", str(source), "--json"])
    assert done.exit_code == 2 and json.loads(done.stdout)["event"] == "error"
