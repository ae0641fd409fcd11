"""`zero3d show layout` as people and programs see it: what it says is what the ranks' code does."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from tests.command import CONFIG
from zero3d.cli.main import app

OWN = """
from torch import nn


def build(vocabulary):
    return nn.Sequential(nn.Embedding(vocabulary, 32), nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without the text that the configuration names: nothing here reads it."""
    (tmp_path / "tiny.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def show(*words: str) -> Result:
    return CliRunner().invoke(app, ["show", "layout", "tiny.toml", *words])


def read(*words: str) -> dict[str, Any]:
    done = show(*words, "--json")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_says_where_each_rank_stands_and_what_it_has(folder: Path) -> None:
    found = read("--set", "parallel.tp=2", "--set", "zero.level=3")
    places = [(rank["rank"], rank["dp"], rank["tp"], rank["pp"]) for rank in found["ranks"]]
    assert places == [(0, 0, 0, 0), (1, 0, 1, 0), (2, 1, 0, 0), (3, 1, 1, 0)]
    assert all(rank["blocks"] == [0, 1] for rank in found["ranks"])
    tensors = found["tensors"]
    assert tensors["blocks.0.attention.qkv.weight"] == {
        "shape": [96, 32],
        "style": "colwise(48)",
        "slices": [
            {"dim": 0, "ranges": [[0, 48]], "padding": 0},
            {"dim": 0, "ranges": [[48, 96]], "padding": 0},
        ],
        "pp": [0],
    }
    assert tensors["norm.weight"] == {"shape": [32], "style": None, "slices": [], "pp": [0]}
    cut = 256 * 32 + 2 * (96 * 32 + 32 * 32 + 2 * 128 * 32)
    assert [rank["parameters"] for rank in found["ranks"]] == [cut // 2 + 5 * 32] * 4
    assert [rank["keeps"]["weights"]["part"] for rank in found["ranks"]] == [[1, 2], [1, 2], [2, 2], [2, 2]]
    assert not (folder / "out").exists(), "nothing is written"


def test_ranks_fill_dp_and_are_one_by_themselves(folder: Path) -> None:
    (folder / "tiny.toml").write_text(CONFIG.replace("dp = 2", 'dp = "auto"'))
    assert len(read()["ranks"]) == 1
    assert len(read("--set", "parallel.tp=2")["ranks"]) == 2
    assert {rank["dp"] for rank in read("-n", "4", "--set", "parallel.tp=2")["ranks"]} == {0, 1}


@pytest.mark.parametrize(("level", "parts"), [(0, "000"), (1, "001"), (2, "011"), (3, "111")])
def test_the_level_says_what_is_kept_in_parts(folder: Path, level: int, parts: str) -> None:
    ranks = read("--set", f"zero.level={level}")["ranks"]
    for rank, about in enumerate(ranks):
        assert [about["keeps"][kind]["part"] for kind in ("weights", "gradients", "optimizer")] == [
            [rank + 1, 2] if one == "1" else [1, 1] for one in parts
        ]


def test_a_vocabulary_that_does_not_divide_is_padded_and_kv_heads_are_held_twice(folder: Path) -> None:
    llama = ("--set", "model.preset=llama", "--set", "model.heads=4", "--set", "model.kv_heads=1")
    tensors = read(*llama, "--set", "parallel.tp=2", "--set", "parallel.dp=1")["tensors"]
    key = tensors["blocks.0.attention.k.weight"]
    assert key["style"] == "kv" and key["slices"][0] == key["slices"][1]
    assert tensors["head.weight"]["slices"][1] == {"dim": 0, "ranges": [[128, 256]], "padding": 0}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_people_see_the_grid_the_slices_and_the_parts(
    folder: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero3d.cli.show_layout.FILE_WIDTH", width)
    done = show("--set", "parallel.tp=2")
    assert done.exit_code == 0
    words = " ".join(done.stdout.split())
    for told in ("4 ranks: dp 2 x tp 2, ZeRO level 2", "rank 2 rank 3 L0-L1 L0-L1", "colwise(48)", "part 2/2"):
        assert told in words
    if width >= 80:
        assert max(map(cell_len, done.stdout.splitlines())) <= width
        assert "blocks.*.attention.qkv.weight" in words and "[96, 32] -> [48, 32]" in words and "0:48 | 48:96" in words
        assert "blocks.*.mlp_norm.weight 2 [32]" in words
        assert "A rank has 16.5 k of 32.9 k: 50.2%." in words


def test_many_ranks_are_told_in_short(folder: Path) -> None:
    many = ("--set", "parallel.dp=1000", "--set", "data.global_batch=1000", "--set", "zero.level=3")
    done = show(*many)
    assert done.exit_code == 0 and len(done.stdout.splitlines()) < 70
    assert "dp 8 to 999: the same" in done.stdout and ".. 999" in done.stdout
    assert len(read(*many)["ranks"]) == 1000


def test_eight_blocks_over_two_stages(folder: Path) -> None:
    """Each half of the blocks, with what is before the first and after the last; a tied weight is on both."""
    cut = ("--set", "model.layers=8", "--set", "parallel.pp=2")
    found = read(*cut, "--set", "parallel.tp=2")
    assert [rank["blocks"] for rank in found["ranks"]] == [[0, 3]] * 4 + [[4, 7]] * 4
    assert [(rank["pp"], rank["dp"], rank["tp"]) for rank in found["ranks"]][3:5] == [(0, 1, 1), (1, 0, 0)]
    tensors = found["tensors"]
    held = {name: tensors[name]["pp"] for name in ("embedding.weight", "norm.weight", "blocks.4.mlp.up.weight")}
    assert held == {"embedding.weight": [0, 1], "norm.weight": [1], "blocks.4.mlp.up.weight": [1]}
    words = " ".join(show(*cut).stdout.split())
    assert "pp 0 dp 0 rank 0 L0-L3" in words and "pp 1 dp 0 rank 2 L4-L7" in words
    assert "pp 0 has embedding; pp 1 has embedding, norm" in words


EIGHT = ("--set", "model.layers=8", "--set", "model.tied=false")


def drawn(*words: str) -> str:
    """The grid, as words: all before the tables."""
    done = show(*EIGHT, *words)
    assert done.exit_code == 0, done.output
    grid = done.stdout.partition("Who holds what")[0].partition("What tensor parallelism")[0]
    return " ".join(grid.split())


def test_the_drawing_of_pp(folder: Path) -> None:
    words = drawn("--set", "parallel.dp=1", "--set", "parallel.pp=2", "--set", "parallel.micro_batch=1")
    assert "pp 0 dp 0 rank 0 L0-L3 57.6 k w all g all o all pp 1 dp 0 rank 1 L4-L7 57.6 k w all g all o all" in words
    assert "pp 0 has embedding; pp 1 has norm, head." in words
    assert "1f1b of 4 micro-batches, bubble 25.0% (simulated)" in words


def test_the_drawing_of_dp_is_whole_copies(folder: Path) -> None:
    words = drawn("--set", "zero.level=0")
    assert "dp 0 rank 0 L0-L7 115 k w all g all o all pp 0 dp 1 rank 1 L0-L7 115 k w all g all o all" in words
    assert "Every rank has the whole model: 115 k parameters." in words


def test_the_drawing_of_tp_has_the_slices_of_each_tensor(folder: Path) -> None:
    done = show(*EIGHT, "--set", "parallel.dp=1", "--set", "parallel.tp=2")
    words = " ".join(done.stdout.split())
    assert "rank 0 rank 1 L0-L7 L0-L7 57.9 k 57.9 k" in words
    for told in (
        "embedding.weight 1 vocab [256, 32] -> [128, 32] 0:128 | 128:256",
        "blocks.*.attention.qkv.weight 8 colwise(48) [96, 32] -> [48, 32] 0:48 | 48:96",
        "blocks.*.attention.out.weight 8 rowwise [32, 32] -> [32, 16] 0:16 | 16:32",
        "blocks.*.mlp.up.weight 8 colwise [128, 32] -> [64, 32] 0:64 | 64:128",
        "blocks.*.mlp.down.weight 8 rowwise [32, 128] -> [32, 64] 0:64 | 64:128",
        "head.weight 1 vocab [256, 32] -> [128, 32] 0:128 | 128:256",
        "norm.weight 1 [32]",
    ):
        assert told in words


@pytest.mark.parametrize(
    ("level", "kept"), [(1, "w all g all o {}"), (2, "w all g {} o {}"), (3, "w {} g {} o {}")], ids=str
)
def test_the_drawing_of_zero_has_the_part_that_each_rank_keeps(folder: Path, level: int, kept: str) -> None:
    words = drawn("--set", f"zero.level={level}", "--set", "parallel.dp=4")
    for rank in range(4):
        part = f"{rank + 1}/4"
        assert f"rank {rank} L0-L7 115 k {kept.format(part, part, part)}" in words


def test_the_drawing_of_3d_with_two_stages_a_rank(folder: Path) -> None:
    stages = ("parallel.pp=2", "parallel.stages_per_rank=2", "parallel.schedule=interleaved", "parallel.micro_batch=1")
    more = [word for key in (*stages, "parallel.tp=2", "zero.level=3") for word in ("--set", key)]
    words = drawn(*more)
    assert "8 ranks: dp 2 x tp 2 x pp 2, ZeRO level 3" in words
    for pp, blocks in enumerate(("L0-L1, L4-L5", "L2-L3, L6-L7")):
        for dp in range(2):
            first = 4 * pp + 2 * dp
            part = f"w {dp + 1}/2 g all o {dp + 1}/2"
            assert f"pp {pp} dp {dp} rank {first} rank {first + 1} {blocks} {blocks}" in words
            assert f"{part} {part}" in words, "gradients are reduced once a step"
    ranks = read(*EIGHT, *more)["ranks"]
    assert [rank["stages"] for rank in ranks] == [[[0, 1], [4, 5]]] * 4 + [[[2, 3], [6, 7]]] * 4


def test_both_choices_of_reduce_in_bytes(folder: Path) -> None:
    """One half of the model, in 4 bytes a parameter, over 2 ranks of dp, in 2 micro-batches."""
    words = (*EIGHT, "--set", "parallel.pp=2", "--set", "parallel.micro_batch=1", "--set", "zero.level=3")
    first, last = 4 * 12 * 32 * 32 + 8 * 32 + 256 * 32, 4 * 12 * 32 * 32 + 8 * 32 + 32 + 256 * 32
    found = read(*words)["reduce"]
    for pp, numel in enumerate((first, last)):
        half = 4 * numel // 2
        gathered = 2 * 2 * half
        assert found["step"][pp] == {"held_bytes": 2 * half, "reduced_bytes": half, "weights_bytes": gathered}
        assert found["micro-batch"][pp] == {"held_bytes": half, "reduced_bytes": 2 * half, "weights_bytes": gathered}
    told = " ".join(show(*words).stdout.split())
    step, each = (f"{numel / 1e3:.0f} kB" for numel in (4 * last, 2 * last))
    assert f"▸ step {step} {each} {4 * 2 * last / 1e3:.0f} kB" in told and f"micro-batch {each} {step}" in told


def refused(*words: str) -> str:
    done = show(*words, "--json")
    assert done.exit_code == 2
    event = json.loads(done.stdout)
    assert (event["event"], event["code"]) == ("error", 2) and event["hint"] and event["message"] in done.stderr
    return f"{event['message']} {event['hint']}"


def test_what_cannot_be_is_refused_as_train_does(folder: Path) -> None:
    assert "2 heads of 48 do not divide over 4 ranks Set parallel.tp to 1 or 2" in refused("--set", "parallel.tp=4")
    assert "parallel.dp = 2 needs 2 ranks" in refused("-n", "3")
    assert "3 ranks cannot be shared by parallel.tp = 2 Start 2 or 4" in refused(
        "-n", "3", "--set", "parallel.tp=2", "--set", "parallel.dp=auto"
    )
    assert "zbv has 2 stages a rank" in refused("--set", "parallel.pp=2", "--set", "parallel.schedule=zbv")
    assert "--allow-code" in refused("--set", "model.path=own_layout:build")
    plan = ("--set", 'parallel.plan={"blocks.*.mlp.uq" = "colwise"}', "--set", "parallel.tp=2")
    assert "no module matches" in refused(*plan)


def test_a_model_of_the_users_own(folder: Path) -> None:
    (folder / "own_layout.py").write_text(OWN)
    own = ("--set", "model.path=own_layout:build", "--allow-code")
    plan = ("--set", 'parallel.plan={"1.?" = "colwise_gather_output"}', "--set", "parallel.tp=2")
    assert read(*own)["ranks"][0]["blocks"] == [0, 2]
    assert read(*own, *plan)["tensors"]["1.2.bias"]["style"] == "colwise_gather_output"
    assert "1.*.bias" in show(*own, *plan).stdout
    assert "no plan says what of the model is cut" in refused(*own, "--set", "parallel.tp=2")
