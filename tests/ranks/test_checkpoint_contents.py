"""What checkpoints hold: everything, once, under the user's names, for readers that know nothing of zero3d.

Bit-equal throughout.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import zero3d
from tests.checkpoint_runs import Run, batches, loss, made, resumed, saved, train
from tests.pipeline_runs import adamw
from tests.world import run_ranks
from zero3d.checkpoint.load import Loaded

pytestmark = pytest.mark.ranks


class Mixed(nn.Module):
    """Parameters and buffers of all kinds; `forward` uses those that are trained, but for `unused`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 6)
        self.frozen = nn.Linear(8, 6).requires_grad_(False)
        self.rounded = nn.Parameter(torch.randn(5, 3).bfloat16(), requires_grad=False)
        self.table = nn.Parameter(torch.randint(0, 100, (2100,)), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.unused = nn.Parameter(torch.randn(3))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("passing", torch.randn(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.first(x) + self.frozen(x)) * self.scale
        return out


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean() + output.mean()


def mixed(seed: int, level: int) -> zero3d.Engine:
    options = {"zero": {"level": level, "reduce": "step"}, "parallel": {"micro_batch": 4}}
    return zero3d.Engine(Mixed(seed), squares, adamw, options)


def steps(engine: zero3d.Engine, first: int, number: int) -> list[float]:
    given = [torch.randn(4, 8, generator=torch.Generator().manual_seed(first + one)) for one in range(number)]
    return [engine.step(one).loss for one in given]


def every_kind(folder: Path, level: int) -> tuple[dict[str, Tensor], list[float], list[tuple[dict[str, Tensor], Any]]]:
    engine = mixed(0, level)
    steps(engine, 0, 2)
    saved(engine, folder, step=2)
    state = engine.full_state_dict()
    losses = steps(engine, 2, 2)
    engine.close()
    others = []
    for other in range(4):
        engine = mixed(1, other)
        steps(engine, 7, 1)  # Gathers are under way, and there is state that must go.
        loaded = resumed(engine, folder)
        others.append((engine.full_state_dict(), (steps(engine, 2, 2), loaded.params, loaded.moments, loaded.buffers)))
        engine.close()
    return state, losses, others


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_frozen_weights_buffers_and_tensors_of_all_kinds_come_back(tmp_path: Path, level: int) -> None:
    """Frozen ones are in no optimizer group, and `unused` has no state; the model that loads had other values."""
    state, losses, others = run_ranks(2, every_kind, tmp_path, level)[0]
    assert len(state) == 16
    for found, (later, params, moments, buffers) in others:
        assert found.keys() == state.keys()
        for name, value in state.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        assert later == losses
        assert (params, moments, buffers) == (11, 2 * 5, 5)


class Counting(nn.Module):
    """A block with buffers that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.layer(x))
        return out


def buffers_of_stages(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    def engine(seed: int) -> zero3d.Engine:
        torch.manual_seed(seed)
        model = nn.Sequential(*(Counting() for _ in range(4)))
        return zero3d.Engine(
            model,
            squares,
            adamw,
            {"model": {"blocks": ""}, "parallel": {"pp": 2, "micro_batch": 2}, "zero": {"level": 1}},
        )

    first = engine(0)
    steps(first, first.dp_index, 2)
    saved(first, folder, step=2)
    second = engine(1)
    resumed(second, folder)
    return first.full_state_dict(), second.full_state_dict()


def test_buffers_of_every_stage_come_back(tmp_path: Path) -> None:
    """Those of the first data-parallel rank, which saw other samples than the second."""
    for before, after in run_ranks(4, buffers_of_stages, tmp_path):
        assert before.keys() == after.keys()
        assert int(before["3.norm.num_batches_tracked"]) == 4
        for name, value in before.items():
            assert torch.equal(value, after[name]), name


def save_in(folder: Path, run: Run) -> dict[str, Tensor]:
    engine = zero3d.Engine(made(), loss, adamw, run.options())
    train(engine, batches()[:2])
    saved(engine, folder, step=2, extra={"sample": 2**53 + 1}, config=engine.config.model_dump(mode="json"))
    return {info.name: engine.weight_of(info.name) for info in engine.parameters}


def by_recipe(path: Path) -> dict[str, Tensor]:
    """Every whole tensor of a checkpoint, with safetensors and nothing of zero3d."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = [safe_open(path / one["name"], framework="pt") for one in manifest["files"]]
    found = {}
    for entry in manifest["tensors"]:
        shape, dim, whole = entry["shape"], entry["dim"], None
        for part in entry["parts"]:
            pieces = {
                piece["begin"]: files[piece["file"]].get_tensor(piece["key"]).view(-1) for piece in part["pieces"]
            }
            flat = torch.cat([piece for _, piece in sorted(pieces.items())])
            if dim is None:
                whole = flat.view(shape)
                continue
            rows = sum(stop - start for start, stop in part["ranges"]) + part["padding"]
            local = flat.view(*shape[:dim], rows, *shape[dim + 1 :])
            whole = local.new_empty(shape) if whole is None else whole
            for start, stop in part["ranges"]:
                whole.narrow(dim, start, stop - start).copy_(local.narrow(dim, 0, stop - start))
                local = local.narrow(dim, stop - start, local.shape[dim] - (stop - start))
        found[f"{entry['name']} {entry['key']}".strip()] = torch.empty(shape) if whole is None else whole
    return found


@pytest.mark.parametrize("run", [Run((4, 1, 1), 0), Run((2, 2, 1), 3), Run((1, 2, 2), 1)], ids=lambda run: run.name)
def test_a_reader_without_a_model_rebuilds_every_tensor(tmp_path: Path, run: Run) -> None:
    """What several ranks hold is written once, and evenly."""
    weights = run_ranks(4, save_in, tmp_path, run)[0]
    path = tmp_path / "step-00000002"
    found = by_recipe(path)
    assert found.keys() == {f"{name}{key}" for name in weights for key in ("", " exp_avg", " exp_avg_sq")}
    for name, value in weights.items():
        assert torch.equal(found[name], value), name
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["extra"] == {"sample": 2**53 + 1} and manifest["config"]["zero"]["level"] == run.level
    sizes = [one["size"] for one in manifest["files"]]
    padding = 32 * 3 * 4 * 3  # Rows that a vocabulary of 61 lacks over 2 ranks, and headers besides.
    total = sum(value.nbytes for value in found.values())
    headers = sum(120 * len(part["pieces"]) for one in manifest["tensors"] for part in one["parts"]) + 4 * 300
    assert total <= sum(sizes) <= total + padding + headers
    assert run.layout[2] > 1 or max(sizes) <= 1.2 * min(sizes)


def adapted(seed: int) -> nn.Module:
    """A frozen base and 1 % to be trained."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).requires_grad_(False)
    torch.manual_seed(seed)
    return nn.Sequential(base, nn.Linear(256, 5))


def parts_of(folder: Path) -> Any:
    engine = zero3d.Engine(adapted(1), squares, adamw, {"parallel": {"micro_batch": 4}})
    data = torch.ones(4, 256)
    for _ in range(2):
        engine.step(data)
    for what in ("all", "weights", "trainable"):
        saved(engine, folder / what, step=2, what=what)
    expected = [engine.step(data).loss for _ in range(2)]
    found: dict[str, Any] = {}
    for what in ("all", "trainable", "weights"):
        engine = zero3d.Engine(adapted(2), squares, adamw, {"parallel": {"micro_batch": 4}})
        if what == "weights":
            with pytest.raises(zero3d.UsageError, match="all optimizer state, as weights alone were saved"):
                resumed(engine, folder / what)
        loaded = resumed(engine, folder / what, allow_missing=what == "weights")
        found[what] = loaded.moments, [engine.step(data).loss for _ in range(2)]
    return expected, found


def test_weights_or_what_is_trained_can_be_saved_alone(tmp_path: Path) -> None:
    expected, found = run_ranks(2, parts_of, tmp_path)[0]
    size = {one.name: sum(file.stat().st_size for file in one.rglob("rank-*")) for one in tmp_path.iterdir()}
    assert size["trainable"] <= 0.05 * size["all"]
    assert found["all"] == found["trainable"] == (4, expected)
    assert found["weights"][0] == 0 and found["weights"][1][0] == expected[0] != found["weights"][1][1]


def other_models(folder: Path) -> list[tuple[str, bool]]:
    def engine(*widths: int) -> zero3d.Engine:
        torch.manual_seed(len(widths))
        layers = [nn.Linear(one, two) for one, two in pairwise(widths)]
        return zero3d.Engine(nn.Sequential(*layers), squares, adamw, {"parallel": {"micro_batch": 2}})

    first = engine(4, 4, 4)
    first.step(torch.ones(2, 4))
    saved(first, folder, step=1)
    found = []
    for widths in ((4, 4), (4, 4, 4, 4), (4, 4, 3)):
        second = engine(*widths)
        before = second.full_state_dict()
        with pytest.raises(zero3d.UsageError) as raised:
            resumed(second, folder)
        after = second.full_state_dict()
        found.append((str(raised.value), all(torch.equal(after[name], value) for name, value in before.items())))
    loaded: Loaded = resumed(engine(4, 4, 4, 4), folder, allow_missing=True)
    found.append((", ".join(loaded.missing), loaded.params == 4))
    return found


def test_names_that_do_not_fit_are_listed_and_nothing_is_written(tmp_path: Path) -> None:
    for rows in run_ranks(2, other_models, tmp_path):
        assert all(good for _, good in rows)
        fewer, more, otherwise, allowed = (text for text, _ in rows)
        assert "it has besides 1.weight, 1.bias, exp_avg of 1.weight" in fewer
        assert "it lacks 2.weight, 2.bias" in more and "allow_missing" in more
        assert "it has otherwise 1.weight F32 [4, 4] instead of [3, 4]" in otherwise
        assert allowed == "2.weight, 2.bias"
