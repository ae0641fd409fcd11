"""Checkpoints without ranks and without a model: whole tensors out of pieces, as files for other programs, in little
memory. Values are bit-equal to what the engine had."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import checkpoint_runs as runs
from tests.world import run_ranks
from zero3d.checkpoint import hub_folder
from zero3d.checkpoint.export import Style, export_checkpoint
from zero3d.checkpoint.hub import Weight, in_files, index
from zero3d.checkpoint.rebuild import Rebuilder, put
from zero3d.checkpoint.slices import Span, cut
from zero3d.checkpoint.write import NAMES
from zero3d.cli import found
from zero3d.errors import DataError, OutOfSpaceError, UsageError

GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "export.md"


def saved(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """By tp 2 x pp 2, with a vocabulary that is padded over tp, a tie, a frozen block and a buffer."""
    model = runs.made()
    model.blocks[1].requires_grad_(False)
    model.register_buffer("seen", torch.arange(5))
    engine = runs.zero3d.Engine(model, runs.loss, runs.adamw, runs.Run((1, 2, 2), 1).options())
    runs.train(engine, runs.batches()[:2])
    given = {"config": {"run": {"seed": 1}}, "extra": {"model_config": {"architectures": ["GPT"], "dtype": "float16"}}}
    return runs.saved(engine, folder, step=2, **given), engine.full_state_dict()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    return run_ranks(4, saved, tmp_path_factory.mktemp("run") / "checkpoints")[0]


def test_a_checkpoint_becomes_files_that_others_read(tmp_path: Path, checkpoint: Any) -> None:
    path, state = checkpoint
    told: list[tuple[int, int]] = []
    done = export_checkpoint(found.find(path.parent.parent), tmp_path / "out", tell=lambda *one: told.append(one))
    assert [one.name for one in done.files] == ["model.safetensors", "config.json"]
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert {*files, "head.weight"} == set(state)
    assert all(torch.equal(files[name], state[name]) and files[name].dtype == state[name].dtype for name in files)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"architectures": ["GPT"], "dtype": "float32"}
    assert told[-1] == (done.nbytes, done.nbytes) == (sum(one.nbytes for one in files.values()),) * 2
    assert told == sorted(told) and len(told) == len(files)


def test_several_files_have_an_index_and_another_dtype(tmp_path: Path, checkpoint: Any) -> None:
    path, state = checkpoint
    style = Style(dtype=torch.bfloat16, shard_bytes=10_000)
    export_checkpoint(found.find(path), tmp_path, style)
    listed = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(set(listed["weight_map"].values()))
    assert names == [f"model-{at:05d}-of-{len(names):05d}.safetensors" for at in range(1, len(names) + 1)]
    read = {name: load_file(tmp_path / file)[name] for name, file in listed["weight_map"].items()}
    assert listed["metadata"]["total_size"] == sum(one.nbytes for one in read.values())
    for name, value in read.items():
        # Integers are no weights that could be rounded.
        dtype = torch.bfloat16 if state[name].is_floating_point() else state[name].dtype
        assert value.dtype == dtype and torch.equal(value, state[name].to(dtype)), name


def test_a_plain_state_dict_has_both_names_of_a_tie(tmp_path: Path, checkpoint: Any) -> None:
    path, state = checkpoint
    export_checkpoint(found.find(path), tmp_path, Style(form="torch"))
    read = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert read.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in read.items())
    assert read["head.weight"].data_ptr() == read["embedding.weight"].data_ptr()
    model = runs.made()
    model.register_buffer("seen", torch.zeros(5, dtype=torch.int64))
    model.load_state_dict(read)


def test_every_dtype_and_shape_is_written_as_it_is(tmp_path: Path) -> None:
    values = {}
    for dtype in NAMES:
        for shape in ((), (3,), (0, 4), (5, 7)):
            raw = torch.arange(prod(shape) * dtype.itemsize, dtype=torch.uint8)
            raw %= 2 if dtype == torch.bool else 100
            values[f"{dtype} {shape}"] = raw.view(dtype).reshape(shape)
    weights = [Weight(name=name, shape=one.shape, dtype=one.dtype) for name, one in values.items()]
    for form, folder in (("safetensors", tmp_path / "a"), ("torch", tmp_path / "b")):
        with hub_folder.HubFolder(folder, weights, form=form) as hub:  # type: ignore[arg-type]
            for one in hub.order:
                hub.add(values[one.name])
            hub.finish()
    read = load_file(tmp_path / "a" / "model.safetensors")
    again = torch.load(tmp_path / "b" / "pytorch_model.bin", weights_only=True)
    for name, value in values.items():
        for one in (read[name], again[name]):
            assert (one.dtype, one.shape) == (value.dtype, value.shape)
            assert torch.equal(one.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def test_files_are_as_large_as_they_may_be() -> None:
    weights = [Weight(name=str(at), shape=[numel], dtype=torch.uint8) for at, numel in enumerate((4, 4, 2, 9, 1, 1))]
    files = in_files(weights, 8)
    assert [[one.numel for one in file.weights] for file in files] == [[4, 4], [2], [9], [1, 1]]
    assert json.loads(index(files))["metadata"] == {"total_parameters": 21, "total_size": 21}
    assert [file.name for file in in_files(weights, 100)] == ["model.safetensors"]


def test_pieces_of_a_cut_tensor_go_where_they_belong() -> None:
    whole, out = torch.arange(60.0).view(3, 10, 2), torch.zeros(60)
    for ranges, padding in (([(0, 2), (6, 8)], 0), ([(2, 6), (8, 10)], 1)):
        part = cut(whole.shape, 1, ranges, padding)
        rows = torch.cat([whole[:, start:stop] for start, stop in ranges] + [torch.full((3, padding, 2), -1.0)], dim=1)
        for begin in range(0, part.numel, 7):
            numel = min(7, part.numel - begin)
            put(rows.reshape(-1)[begin : begin + numel], Span(part, begin, numel), whole.shape, out)
    assert torch.equal(out.view(whole.shape), whole)


def damaged(folder: Path, source: Path) -> Path:
    """A copy with one bit flipped in the middle of a file, of its size."""
    target = folder / source.name
    target.mkdir(parents=True)
    for one in source.iterdir():
        (target / one.name).write_bytes(one.read_bytes())
    file = sorted(target.glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 8] ^= 1
    file.write_bytes(data)
    return target


def test_damage_is_refused_and_nothing_is_left(tmp_path: Path, checkpoint: Any) -> None:
    bad = found.find(damaged(tmp_path, checkpoint[0]))
    with pytest.raises(DataError, match="are not what was written") as caught:
        export_checkpoint(bad, tmp_path / "out" / "deep")
    assert caught.value.where.startswith(str(bad.path)) and caught.value.hint
    assert not (tmp_path / "out" / "deep").exists()
    with Rebuilder(bad.path, bad.manifest) as rebuilder, pytest.raises(DataError, match="not what was written"):
        rebuilder.verify(lambda done, total: None)
    good = found.find(checkpoint[0])
    with Rebuilder(good.path, good.manifest) as rebuilder:
        rebuilder.verify(lambda done, total: None)


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = hub_folder.shutil.disk_usage("/")
    monkeypatch.setattr(hub_folder.shutil, "disk_usage", lambda path: usage._replace(free=1000))


def killed_before(folder: Path) -> None:
    (folder / "model.safetensors.partial").write_text("half")


@pytest.mark.parametrize(
    ("prepare", "error", "told"),
    [
        (lambda folder: (folder / "model.safetensors").touch(), UsageError, ["it has model.safetensors", "Name a new"]),
        (killed_before, UsageError, ["model.safetensors.partial", "left of an export that was killed"]),
        (full_disk, OutOfSpaceError, ["MB are free", "Free some space"]),
    ],
)
def test_what_is_in_the_way_is_told(
    tmp_path: Path,
    checkpoint: Any,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Any], None],
    error: type[Exception],
    told: list[str],
) -> None:
    prepare(monkeypatch if prepare is full_disk else tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error) as caught:
        export_checkpoint(found.find(checkpoint[0]), tmp_path)
    assert all(words in str(caught.value) for words in (*told, str(tmp_path)))
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_path_means(tmp_path: Path, checkpoint: Any) -> None:
    path = checkpoint[0]
    assert {found.find(one).path for one in (path, path.parent, path.parent.parent)} == {path}
    for wrong in (tmp_path, tmp_path / "none", tmp_path / "step-00000009", GUIDE):
        for call in (found.find, found.look):
            with pytest.raises(DataError) as caught:
                call(wrong)
            assert caught.value.where and caught.value.hint


LARGE = """
import sys
from pathlib import Path
from tests.ranks.test_building import Peak, own_memory
from zero3d.checkpoint.export import Style, export_checkpoint
from zero3d.cli import found

taken = found.find(Path(sys.argv[1]))
export_checkpoint(taken, Path(sys.argv[2]) / "warm", Style(shard_bytes=50_000_000))
for form in ("safetensors", "torch"):
    before, peak = own_memory(), Peak()
    peak.start()
    export_checkpoint(taken, Path(sys.argv[2]) / form, Style(form=form))
    peak.over.set()
    peak.join()
    print(peak.most - before)
"""
"""In a process of its own, in which nothing else is freed or held."""


def large(folder: Path) -> Path:
    from zero3d import Engine

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    engine = Engine(model, lambda out, batch: out.sum(), "adamw", {})
    return runs.saved(engine, folder, step=0, what="weights")


def test_no_more_is_in_memory_than_the_largest_tensor_and_a_little(tmp_path: Path) -> None:
    """100 MB in tensors of 4 MB."""
    [path] = run_ranks(1, large, tmp_path)
    words = [sys.executable, "-c", LARGE, str(path), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.split())) < 4 * 2**20 + 16e6, done.stdout


def recipe() -> Callable[[Path], Iterator[tuple[str, Tensor]]]:
    """The one of the guide."""
    [code] = [one for one in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "def tensors(" in one]
    assert len(code.splitlines()) <= 30 and "zero3d" not in code
    names: dict[str, Any] = {}
    exec(code, names)
    found_function: Callable[[Path], Iterator[tuple[str, Tensor]]] = names["tensors"]
    return found_function


def test_the_guides_recipe_rebuilds_every_tensor_with_safetensors_alone(checkpoint: Any) -> None:
    path, state = checkpoint
    read = dict(recipe()(path))
    taken = found.find(path)
    with Rebuilder(path, taken.manifest) as rebuilder:
        for entry in taken.manifest.tensors:
            key = f"{entry.name}/{entry.key}" if entry.key else entry.name
            value = rebuilder.tensor(entry)
            assert torch.equal(read[key], value) and read[key].dtype == value.dtype, key
            assert entry.key or torch.equal(value, state[entry.name]), key
    assert len(read) == len(taken.manifest.tensors) > 2 * len(state)
