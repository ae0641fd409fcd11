"""`zero3d plan`: what it chooses and rejects, with numbers; what it writes; what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zero3d.cli.main import app
from zero3d.config import Config
from zero3d.planner.hardware import PRESETS

KEYS = {
    "layout",
    "level",
    "micro_batch",
    "schedule",
    "recompute",
    "offload",
    "peak_bytes",
    "tokens_per_second",
    "mfu",
    "bubble",
}
TINY = """
[model]
preset = "llama"
width = 64
layers = 3
heads = 4
kv_heads = 2
mlp_width = 128
[data]
sequence_length = 32
global_batch = 16
[optimizer]
lr = 0.002
"""


def plan(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == code, done.output
    return done.output if code else done.stdout


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def described(tmp_path: Path) -> str:
    """Four CPU devices of 16 GB in one machine of 64 GB, as a profile says it."""
    cpu = PRESETS["CPU"]
    device = cpu.device.model_copy(update={"memory": 16e9})
    host = cpu.host.model_copy(update={"memory": 64e9})
    path = tmp_path / "profile.json"
    path.write_text(cpu.with_changes(device=device, host=host, per_node=4).to_json())
    return str(path)


def test_c80_a_described_machine_is_searched_and_every_rejection_has_a_number(tiny: str, described: str) -> None:
    event = json.loads(plan("--model", tiny, "--devices", "4", "--device", described, "--json"))
    plans, rejected = event["plans"], event["rejected"]
    assert 1 <= len(plans) <= 10 and set(plans[0]) >= KEYS
    speeds = [one["tokens_per_second"] for one in plans]
    assert speeds == sorted(speeds, reverse=True)
    for one in plans:
        layout = one["layout"]
        assert layout["dp"] * layout["tp"] * layout["pp"] == 4
        assert one["peak_bytes"] == sum(one["peak_by_kind"].values()) < 16e9 * 0.92
    assert {one["why"] for one in rejected} >= {"slower", "cannot be"}
    assert all(one["reason"] and one["unit"] and one["number"] > 0 for one in rejected)
    assert event["neighbours"] and all(one["reason"] for one in event["neighbours"])
    assert all(set(one["calls"]) == set(one["sent_bytes"]) for one in (*plans, *event["neighbours"]))
    changes = {one["change"].split()[0] for one in event["neighbours"]}
    assert {"tp", "pp", "level", "micro_batch", "recompute", "offload"} <= changes | {"reduce"}


def test_the_configuration_it_writes_is_that_plan(tiny: str, described: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    event = json.loads(
        plan("--model", tiny, "--devices", "4", "--device", described, "--out", str(out), "--json", "--top", "1")
    )
    (best,) = event["plans"]
    config = Config.load(out).resolved(4, native_bf16=False)
    assert {axis: getattr(config.parallel, axis) for axis in ("dp", "tp", "pp")} == best["layout"]
    assert (config.zero.level, config.parallel.micro_batch) == (best["level"], best["micro_batch"])
    assert (config.recompute.mode, config.zero.reduce) == (best["recompute"], best["reduce"])
    assert config.optimizer.lr == 0.002 and config.model.width == 64  # what the given one said
    assert event["config"] == str(out)


def test_what_it_says_is_what_a_rehearsal_of_its_configuration_finds(tiny: str, described: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    words = ("--model", tiny, "--devices", "4", "--device", described, "--out", str(out), "--json", "--top", "1")
    (best,) = json.loads(plan(*words))["plans"]
    done = CliRunner().invoke(app, ["dryrun", str(out), "--world", "4", "--json"])
    assert done.exit_code == 0, done.output
    peak = max(one["peak_bytes"] for one in json.loads(done.stdout)["ranks"])
    assert best["peak_bytes"] == pytest.approx(peak, rel=0.02)


def test_tables_for_people(tiny: str, described: str) -> None:
    told = plan("--model", tiny, "--devices", "4", "--device", described)
    for text in ("tokens/s", "MFU", "bubble", "One setting changed", "Rejected", "Its own error", "8%", "calls"):
        assert text in told
    assert "0.0 GB" not in told
    assert "calibrated machine" in told and "published runs" not in told
    memory = told.partition("Memory of the rank")[2]
    assert "level" in memory.splitlines()[2] and "varied" not in told
    tree = json.loads(Path(described).read_text())
    Path(described).write_text(json.dumps(tree | {"spread": 0.4}))
    assert "timings varied by 40%" in plan("--model", tiny, "--devices", "4", "--device", described, "--top", "1")
    rows = [" ".join(line.split()) for line in told.partition("Rejected")[2].splitlines() if " x " in line]
    layouts = [(row.split()[:5], why) for row in rows for why in ("cannot be", "does not fit", "slower") if why in row]
    assert layouts and all(layouts.count(one) == 1 for one in layouts)


def test_a_model_that_fits_nowhere_says_the_least_that_would(described: str) -> None:
    words = ("--model", "llama3-8b", "--devices", "1", "--device", "CPU", "--host-memory", "1", "--sequence", "256")
    done = CliRunner().invoke(app, ["plan", *words, "--json"])
    assert done.exit_code == 2
    event: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    assert event["plans"] == [] and not event["least"]["fits"]
    assert event["least"]["peak_bytes"] > event["device_bytes"]
    assert event["rejected"] and all(one["number"] > 0 for one in event["rejected"])
    way = event["ways"][0]
    assert "devices" in way["what"] and way["fits"] and way["peak_bytes"] < event["device_bytes"]
    assert "nothing fits 1 x CPU" in done.stderr and "What would do" in done.stderr


def test_where_the_host_is_too_small_the_least_is_of_the_host(described: str, tmp_path: Path) -> None:
    """Once it named the host's memory of the layout that takes the least of a device, and not what the machine has."""
    tree = json.loads(Path(described).read_text())
    tree["device"]["memory"] = 1e9
    Path(described).write_text(json.dumps(tree))
    words = ("--model", "gpt2", "--devices", "2", "--device", described, "--sequence", "64", "--top", "1")
    told = plan(*words, "--host-memory", "1", code=2)
    text = " ".join(told.split())
    assert "of the 900 MB that a run may take of each machine's 1.00 GB" in text
    assert "of its host, which has 450 MB a rank" in text.partition("the nearest of them")[2][:200]
    (enough,) = map(int, re.findall(r"machines of [\d.]+ GB of memory \(--host-memory (\d+)\)", text))
    plan(*words, "--host-memory", str(enough))
    plan(*words, "--host-memory", str(enough - 1), code=2)
    tree["device"]["memory"] = 1e8
    Path(described).write_text(json.dumps(tree))
    text = " ".join(plan(*words, "--host-memory", "1", code=2).split())
    both = re.search(r"devices of ([\d.]+) MB and machines of [\d.]+ GB of memory \(--host-memory (\d+)\)", text)
    assert both is not None, text
    tree["device"]["memory"] = float(both[1]) * 1e6
    Path(described).write_text(json.dumps(tree))
    plan(*words, "--host-memory", both[2])


def test_public_models_and_transformers_folders(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    told = {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(told))
    words = ("--devices", "2", "--device", "A100", "--json")
    event = json.loads(plan("--model", str(tmp_path), *words))
    assert event["plans"] and event["sequence"] == 64
    out = tmp_path / "hf.toml"
    told_of_it = plan("--model", str(tmp_path), *words[:-1], "--out", str(out))
    assert "model.path is to be filled in" in " ".join(told_of_it.split())
    for verb in (["train", str(out), "--allow-code"], ["dryrun", str(out), "--allow-code"]):
        refused = CliRunner().invoke(app, verb)
        assert refused.exit_code == 2 and "is to be filled in" in refused.stderr and "--model FOLDER" in refused.stderr
    done = CliRunner().invoke(app, ["dryrun", str(out), "--model", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.stderr
    peak = max(one["peak_bytes"] for one in json.loads(done.stdout)["ranks"])
    assert event["plans"][0]["peak_bytes"] == pytest.approx(peak, rel=0.02)
    del told["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert "hidden_size" in plan("--model", str(tmp_path), *words, code=2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device.flops", {}),
        ("device.flops", {"fp8": 1e12}),
        ("device.flops", {"fp32": 5e-324}),
        ("device.bandwidth", 1e-300),
        ("device.memory", float("inf")),
        ("device.memory", float("nan")),
        ("device.launch", float("inf")),
        ("device.rates", {**PRESETS["CPU"].device.rates.model_dump(), "moving": 5e-324}),
        ("host.memory", float("inf")),
        ("host.cores", 10**30),
        ("inside", {"latency": 0, "bandwidth": 1e-300}),
    ],
)
def test_a_profile_with_numbers_that_no_device_has(described: str, key: str, value: object) -> None:
    """Once KeyError, ZeroDivisionError after seconds, or a plan."""
    tree = json.loads(Path(described).read_text())
    *above, last = key.split(".")
    (tree[above[0]] if above else tree)[last] = value
    Path(described).write_text(json.dumps(tree))
    told = plan("--model", "gpt2", "--devices", "2", "--device", described, code=2)
    assert "Traceback" not in told and ("no profile of a cluster" in told or "products in fp32" in told)


def test_a_profile_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff\xfe{}")
    assert "UTF-8" in plan("--model", "gpt2", "--devices", "2", "--device", str(path), code=2)


@pytest.mark.parametrize("number", [1.0, 1e24])
def test_the_least_and_the_most_of_a_profile(described: str, number: float) -> None:
    tree = json.loads(Path(described).read_text())
    tree["device"] |= {"flops": {"fp32": number}, "bandwidth": number}
    for link in ("inside", "across"):
        tree[link] |= {"bandwidth": number}
    tree["host"] |= {"update": number, "copy_rate": number}
    Path(described).write_text(json.dumps(tree))
    assert "tokens/s" in plan("--model", "gpt2", "--devices", "2", "--device", described, "--top", "1")


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (("--model", "lama3-8b", "--devices", "8", "--device", "H100"), ("lama3-8b", "llama3-8b")),
        (("--model", "llama3-8b", "--devices", "8", "--device", "H1000"), ("H1000", "H100-80GB")),
        (("--model", "llama3-8b", "--devices", "12", "--device", "H100"), ("12", "8 or 16")),
        (("--model", "llama3-8b", "--devices", "0", "--device", "H100"), ("--devices",)),
        (("--model", "some.where:build", "--devices", "2", "--device", "H100"), ("--allow-code",)),
        (("--model", "no/such/folder", "--devices", "2", "--device", "H100"), ("no/such/folder",)),
        (("--model", "gpt2", "--devices", "2", "--device", "H100", "--out", "plan.yaml"), ("plan.toml",)),
        (("--model", " ", "--devices", "2", "--device", "H100"), ("--model is empty",)),
        (("--model", "gpt2", "--devices", "2", "--device", "H100", "--host-memory", "inf"), ("--host-memory inf",)),
        (("--model", "gpt2", "--devices", "2", "--device", "H100", "--host-memory", "nan"), ("--host-memory nan",)),
    ],
)
def test_bad_input(words: tuple[str, ...], hints: tuple[str, ...]) -> None:
    told = " ".join(plan(*words, code=2).split())
    assert all(hint in told for hint in hints), told
