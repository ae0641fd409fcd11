"""`verify`: what is right is found equal or close, and of what is wrong the right parameter is named.

Bit-equal: the comparisons of levels 0 to 3 among each other, as the levels are. Close: layout and plain process.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero3d
from tests import command, tiny
from tests.world import run_ranks
from zero3d.comparison import Comparison

pytestmark = pytest.mark.ranks

STEPS = 3


def config(level: int = 2, **sections: object) -> dict[str, Any]:
    return {
        "zero": {"level": level, "reduce": "step"},
        "parallel": {"micro_batch": 2},
        "optimizer": {"clip_norm": 0.5, "schedule": "linear", "warmup": 2},
        **sections,
    }


def compare(model: Any, given: dict[str, Any], optimizer: Any = tiny.adamw) -> Comparison:
    return zero3d.verify(model, tiny.loss, tiny.batches(STEPS, 8), optimizer, given)


def with_dropout() -> nn.Module:
    return tiny.tiny(dropout=0.2)


def levels_and_sources() -> tuple[list[Comparison], list[Comparison], bool]:
    mine = with_dropout()
    before = [parameter.detach().clone() for parameter in mine.parameters()]
    levels = [compare(mine, config(level)) for level in range(4)]
    untouched = all(map(torch.equal, before, mine.parameters()))
    with torch.device("meta"):
        on_meta = tiny.tiny(layers=2)
    patterns = {"blocks.*": "sgd", "*": "adamw"}
    others = [
        compare(with_dropout, config(3, recompute={"mode": "block"}), patterns),
        compare(tiny.tiny, config(precision={"compute": "bf16"})),
        zero3d.verify(on_meta.norm, lambda out, x: (out.square().sum(), len(x)), torch.randn(5, tiny.WIDTH)),
    ]
    return levels, others, untouched


def test_what_is_right_is_equal_or_close() -> None:
    """Dropout is on: the plain process draws what each rank draws."""
    (levels, others, untouched), again = run_ranks(2, levels_and_sources)
    assert (levels, others) == again[:2], "the same on every rank"
    assert untouched, "the user's module is left as it is"
    num_parameters = len(list(with_dropout().parameters()))
    for found in (*levels, *others[:1]):
        assert found.verdict == "close" and found.first_difference is None
        assert len(found.steps) == STEPS and not found.notes
        assert [row.kind for row in found.steps[1]].count("gradient") == num_parameters
        assert [row.kind for row in found.steps[STEPS]] == ["loss", "gradient norm"] + ["weight"] * num_parameters
    assert all(found.rows == levels[0].rows for found in levels)
    _, bf16, repeated = others
    assert bf16.verdict == "close" and bf16.tolerance == 2e-2
    assert {row.kind for row in bf16.rows} == {"loss", "gradient norm", "gradient"}
    assert "weights are not compared" in bf16.notes[0]
    assert repeated.verdict in ("equal", "close") and len(repeated.steps) == 5, (
        "one batch, of five samples on two ranks"
    )


class Straying(tiny.Tiny):
    """Its last activation depends on the rank."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + 0.01 * dist.get_rank())


class Detached(tiny.Block):
    """One of its weights gets no gradient on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight.detach() if dist.get_rank() else self.up.weight
        return x + self.down(nn.functional.linear(self.norm2(x), weight))


def detached() -> nn.Module:
    torch.manual_seed(0)
    model = tiny.Tiny()
    model.blocks[2] = Detached()
    return model


def uneven_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Another learning rate on rank 1, which updates its own shards."""
    return torch.optim.SGD(parameters, lr=1.0 if dist.get_rank() else 2.0)


def wrong_ones() -> list[Comparison]:
    return [
        compare(Straying, config()),
        compare(detached, config(3)),
        compare(tiny.tiny, config(1, optimizer={}), uneven_sgd),
        compare(detached, config(precision={"compute": "bf16"})),
    ]


def test_of_what_is_wrong_the_first_parameter_is_named() -> None:
    found, again = run_ranks(2, wrong_ones)
    assert found == again, "the same on every rank, though each rank's plain training is another"
    assert {one.verdict for one in found} == {"different"}
    firsts = [one.first_difference for one in found]
    assert all(first is not None and first.step == 1 for first in firsts)
    straying, unlearned, updated, in_16_bits = [(first.kind, first.name) for first in firsts if first is not None]
    assert straying == ("gradient", "places")
    # Clipping makes every weight differ from step 1 on; the gradient tells which it comes from.
    assert unlearned == in_16_bits == ("gradient", "blocks.2.up.weight")
    assert updated[0] == "weight", "gradients of step 1 agree"


class Encoder(nn.Module):
    """Attention with a key bias, whose gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCABULARY, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, tiny.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.encoder(self.embed(tokens)).transpose(1, 2)).transpose(1, 2))


def known_differences() -> tuple[Comparison, str]:
    found = compare(Encoder, config())
    try:
        zero3d.verify(Encoder, tiny.loss, [])
    except zero3d.UsageError as error:
        return found, str(error)
    return found, ""


def test_differences_that_rounding_explains_are_notes() -> None:
    """Adam makes steps of full length of a key bias' gradient, in any direction."""
    (found, refused), _ = run_ranks(2, known_differences)
    assert found.verdict == "close"
    text = " ".join(found.notes)
    assert "in_proj_bias" in text and "no more than rounding explains" in text
    assert "Batch normalisation" in text and "the same micro-batches" in text
    assert "nothing to compare" in refused


STRAYING = """
import os
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens) + 0.1 * int(os.environ["RANK"])
        for block in self.blocks:
            x = x + block(x)
        return x @ self.embed.weight.T
"""
COMPARE_KEYS = ["event", "step", "verdict", "loss", "grad_norm", "gradient", "weight", "worst"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(STRAYING)
    return command.fill(tmp_path)


def verify(folder: Path, *words: str) -> Any:
    return command.zero3d(folder, "verify", "tiny.toml", *words)


@pytest.mark.cli
def test_the_command_shows_a_line_a_step_and_the_verdict(folder: Path) -> None:
    done = verify(folder, "--steps", "2", "--set", "zero.level=3")
    assert done.returncode == 0, done.stderr
    for part in ("dp 2, ZeRO level 3", "verdict", "weights", "one plain process", "within 1e-05 over 2 steps"):
        assert part in done.stdout, part
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines if line and line[0] in ("1", "2")] == [["1", "close"], ["2", "close"]]


@pytest.mark.cli
def test_a_difference_leaves_with_4_and_is_told_to_programs_too(folder: Path) -> None:
    done = verify(folder, "--set", "model.path=mine:Mine", "--allow-code", "--json", "--steps", "1")
    assert done.returncode == 4, done.stderr
    step, last = map(json.loads, done.stdout.splitlines())
    assert list(step) == COMPARE_KEYS and step["event"] == "compare" and step["verdict"] == "different"
    assert last["event"] == "done" and last["verdict"] == "different" and last["steps"] == 1
    assert last["first_difference"].items() >= {"step": 1, "kind": "gradient", "parameter": "embed.weight"}.items()
    assert (folder / "out" / "verify.jsonl").read_text() == done.stdout


@pytest.mark.cli
def test_under_torchrun_a_difference_ends_the_launcher_too(folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "zero3d", "verify", "tiny.toml", "--steps", "1", "--json"]
    equal = subprocess.run([*launcher, *words], cwd=folder, capture_output=True, text=True, timeout=120)
    assert equal.returncode == 0, equal.stderr
    words += ["--allow-code", "--set", "model.path=mine:Mine"]
    differs = subprocess.run([*launcher, *words], cwd=folder, capture_output=True, text=True, timeout=120)
    assert differs.returncode != 0 and "exitcode  : 4 " in differs.stderr, differs.stderr
    assert json.loads(differs.stdout.splitlines()[-1])["verdict"] == "different"


@pytest.mark.cli
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "0"], "steps"),
        (["--set", "zero.level=4"], "outside 0 to 3"),
        (["--set", "model.path=mine:Mine"], "--allow-code"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_bad_input_leaves_with_2(folder: Path, words: list[str], told: str) -> None:
    done = verify(folder, *words)
    assert done.returncode == 2 and told in done.stderr
    assert not done.stdout and "Traceback" not in done.stderr
