"""Weights from running ranks as files: those of the un-parallelised module, whatever a rank has of them (C8, C10, C19),
without room for the model (C7). Values are bit-equal to `full_state_dict`."""

import errno
import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zero3d
from tests.checkpoint_runs import LAYOUTS, VOCABULARY, Run, batches, loss, train
from tests.checkpoint_runs import made as made_plain
from tests.pipeline_runs import adamw
from tests.ranks.test_building import Peak, own_memory
from tests.ranks.test_transformers import CASES as MODELS
from tests.ranks.test_transformers import batches as transformers_batches
from tests.ranks.test_transformers import loss_of, options_for, part
from tests.world import run_ranks
from zero3d.checkpoint import hub_folder
from zero3d.checkpoint.export import Style, export
from zero3d.checkpoint.hub_state import HubState
from zero3d.errors import OutOfSpaceError, UsageError
from zero3d.models.gpt import GPT

pytestmark = pytest.mark.ranks


def made() -> GPT:
    """Half of the blocks are frozen; of two buffers one is not kept."""
    model = made_plain()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    model.register_buffer("seen", torch.arange(5))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    return model


def exported(engine: zero3d.Engine, folder: Path, style: Style | None = None, **options: Any) -> list[str]:
    done = export(engine._parts, engine._mesh, folder, style, **options)
    return [one.name for one in done.files]


def read(folder: Path) -> dict[str, Tensor]:
    """What a program with safetensors alone reads."""
    listed = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if listed.is_file():
        names = set(json.loads(listed.read_text())["weight_map"].values())
    return {name: value for file in sorted(names) for name, value in load_file(folder / file).items()}


def export_all(folder: Path, runs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Tensor]]:
    """Each trains a step and exports; -> what full_state_dict gives."""
    states = []
    for name, options in runs:
        engine = zero3d.Engine(made(), loss, adamw, options)
        train(engine, batches()[:1])
        exported(engine, folder / name, Style(shard_bytes=20_000))
        states.append(engine.full_state_dict())
        engine.close()
    return states


def options_of(run: Run, home: str = "device") -> tuple[Run, tuple[str, dict[str, Any]]]:
    return run, (f"{run.name}-{home}", {**run.options(), "offload": {"optimizer": home}})


CASES = [options_of(Run((4, 1, 1), level)) for level in range(4)]
CASES += [options_of(Run(layout, level)) for layout in [*LAYOUTS[1:], (2, 2, 2)] for level in (1, 3)]
CASES += [options_of(Run(layout, 3), "host") for layout in ((4, 1, 1), (2, 2, 1))]


@pytest.mark.parametrize("world", [1, 4, 8])
def test_every_layout_exports_the_plain_modules_own_state(tmp_path: Path, world: int) -> None:
    runs = [options for run, options in CASES if run.world == world]
    states = run_ranks(world, export_all, tmp_path, runs)[0]
    plain = made().state_dict()
    for (name, _), state in zip(runs, states, strict=True):
        files = read(tmp_path / name)
        assert {*files, "head.weight"} == set(plain), name
        for key, value in files.items():
            assert (value.shape, value.dtype) == (plain[key].shape, plain[key].dtype), (name, key)
            assert torch.equal(value, state[key]), (name, key)
        assert not torch.equal(files["blocks.3.mlp.up.weight"], plain["blocks.3.mlp.up.weight"]), name
        largest = max(value.nbytes for value in files.values())
        sizes = [file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")]
        assert len(sizes) > 3 and max(sizes) < max(20_000, largest) + 4096
        assert not list((tmp_path / name).glob("*.partial"))


def in_other_dtypes(folder: Path) -> list[str]:
    engine = zero3d.Engine(made().to(torch.bfloat16), loss, adamw, {"precision": {"compute": "bf16"}})
    train(engine, batches()[:1])
    exported(engine, folder / "own")
    exported(engine, folder / "fp32", Style(dtype=torch.float32))
    return exported(engine, folder / "torch", Style(form="torch"), config={"architectures": ["GPT"], "dtype": "x"})


def test_dtypes_are_the_modules_own_or_what_is_asked_for(tmp_path: Path) -> None:
    names = run_ranks(2, in_other_dtypes, tmp_path)
    own, wide = read(tmp_path / "own"), read(tmp_path / "fp32")
    assert {value.dtype for value in own.values()} == {torch.bfloat16, torch.int64}
    assert {value.dtype for value in wide.values()} == {torch.float32, torch.int64}
    # Asked for, the fp32 master weights come as they are, not by way of bf16.
    assert all(torch.equal(value.to(own[name].dtype), own[name]) for name, value in wide.items())
    assert any(not torch.equal(value, own[name].to(value.dtype)) for name, value in wide.items())
    assert names == [["pytorch_model.bin", "config.json"]] * 2
    assert sorted(one.name for one in (tmp_path / "torch").iterdir()) == ["config.json", "pytorch_model.bin"]
    state = torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True)
    assert list(set(state) - set(own)) == ["head.weight"], "both names of a tie"
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert all(torch.equal(state[name], value) for name, value in own.items())
    config = json.loads((tmp_path / "torch" / "config.json").read_text())
    assert config == {"architectures": ["GPT"], "dtype": "bfloat16"}


def load_again(folder: Path) -> tuple[dict[str, Tensor], bool]:
    """Into an engine of another layout, as it is made."""
    options = Run((1, 2, 2), 3).options()
    engine = zero3d.Engine(zero3d.pretrained(folder, made), loss, adamw, options)
    return engine.full_state_dict(), torch.isfinite(torch.tensor(train(engine, batches()[:1]))).item()


def test_what_is_exported_is_what_a_model_of_another_layout_begins_with(tmp_path: Path) -> None:
    run, one = CASES[3]
    state = run_ranks(run.world, export_all, tmp_path, [one])[0][0]
    for found, trains in run_ranks(4, load_again, tmp_path / one[0]):
        assert trains and found.keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in found.items())


WIDTH = 1024


class Large(nn.Module):
    """200 MB, half of it in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


LARGEST = 24 * WIDTH * WIDTH * 4


def memory(folder: Path) -> int:
    """Bytes that the export took at most."""
    engine = zero3d.Engine(Large, lambda out, batch: (out.sum(), 1), adamw, {"zero": {"level": 3}})
    engine.evaluate(torch.ones(1, WIDTH))
    gc.collect()
    peak, before = Peak(), own_memory()
    peak.start()
    exported(engine, folder / "out", Style(shard_bytes=60_000_000))
    peak.over.set()
    peak.join()
    return peak.most - before


def test_no_rank_has_room_for_the_model(tmp_path: Path) -> None:
    """Rank 0 has the largest tensor; the others only what is on its way."""
    first, *others = run_ranks(4, memory, tmp_path)
    assert first < LARGEST + 64e6 < 2 * LARGEST
    assert max(others) < 64e6
    assert sum(value.numel() for value in read(tmp_path / "out").values()) == 24 * (2 * WIDTH * WIDTH + WIDTH)


def failing(engine: zero3d.Engine, folder: Path, style: Style | None = None) -> tuple[str, str]:
    try:
        exported(engine, folder, style)
    except zero3d.Zero3dError as error:
        return type(error).__name__, str(error)
    return "", ""


class Full:
    """A file on a disk that is full after some bytes."""

    def __init__(self, path: Path, mode: str, buffering: int) -> None:
        self._file = open(path, mode, buffering=buffering)  # noqa: SIM115
        self._left = 50_000

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


def all_that_fails(folder: Path) -> list[tuple[str, str]]:
    engine = zero3d.Engine(made(), loss, adamw, Run((1, 2, 2), 1).options())
    (folder / "there").mkdir(exist_ok=True)
    (folder / "there" / "notes.txt").write_text("mine")
    (folder / "file").write_text("")
    told = [failing(engine, folder / name) for name in ("there", "file", "file/below")]
    hub_folder.open = Full  # type: ignore[attr-defined]
    told.append(failing(engine, folder / "full" / "a"))
    del hub_folder.open  # type: ignore[attr-defined]
    told.append(failing(engine, folder / "differing", Style(shard_bytes=1000 + engine.rank)))
    train(engine, batches()[:1])
    told.append(failing(engine, folder / "full" / "a"))
    return told


def test_an_error_is_everyones_and_leaves_nothing(tmp_path: Path) -> None:
    told = run_ranks(4, all_that_fails, tmp_path)
    assert all(one == told[0] for one in told)
    kinds, texts = zip(*told[0])
    assert kinds == (UsageError.__name__,) * 3 + (OutOfSpaceError.__name__, UsageError.__name__, "")
    assert "notes.txt" in texts[0] and "Name a new one" in texts[0] and str(tmp_path / "there") in texts[0]
    assert "this is a file" in texts[1]
    assert "rank 0" in texts[3] and str(tmp_path / "full" / "a") in texts[3] and "Free some space" in texts[3]
    assert "rank 0 exports as" in texts[4] and "1001" in texts[4] and not (tmp_path / "differing").exists()
    assert [one.name for one in (tmp_path / "there").iterdir()] == ["notes.txt"]
    assert [one.name for one in (tmp_path / "full" / "a").iterdir()] == ["model.safetensors"], "the try after"


def on_one_rank(folder: Path) -> tuple[str, str]:
    engine = zero3d.Engine(made(), loss, adamw, Run((2, 1, 1), 3).options())
    call = partial(export, engine._parts, engine._mesh, folder / "out", patience=1.0)
    if engine.rank == 0:
        with pytest.raises(zero3d.DivergedError, match="export is collective, and rank 1 has not called it"):
            call()
    losses = train(engine, batches()[:1])
    call()
    return str(len(losses)), str(VOCABULARY)


def test_export_on_one_rank_is_an_error_after_which_training_goes_on(tmp_path: Path) -> None:
    run_ranks(2, on_one_rank, tmp_path)
    assert read(tmp_path / "out")["embedding.weight"].shape[0] == VOCABULARY


def of_transformers(folder: Path, names: list[str]) -> list[dict[str, Tensor]]:
    states = []
    for name in names:
        engine = zero3d.Engine(MODELS[name], loss_of(name), adamw, options_for(3))
        engine.step(part(transformers_batches(name)[0], engine.rank))
        exported(engine, folder / name, Style(shard_bytes=50_000))
        states.append(engine.full_state_dict())
        engine.close()
    return states


def test_transformers_loads_what_is_exported(tmp_path: Path) -> None:
    """With the configuration, ties left out, and experts fused as the model has them: nothing is missing or new."""
    names = ["gpt2", "qwen3", "mixtral", "bert", "t5"]
    for name, state in zip(names, run_ranks(2, of_transformers, tmp_path, names)[0], strict=True):
        model, info = MODELS[name].auto.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], name
        found = model.state_dict()
        assert found.keys() == state.keys(), name
        assert all(torch.equal(value, state[key]) for key, value in found.items()), name
        assert model.config.architectures == [type(model).__name__]


def load_into_a_running_engine(folder: Path) -> tuple[bool, list[float]]:
    engine = zero3d.Engine(made(), loss, adamw, Run((2, 2, 1), 3).options())
    train(engine, batches()[:1])
    exported(engine, folder / "out")
    saved, later = engine.full_state_dict(), train(engine, batches()[1:3])
    state = HubState(folder / "out", engine.parameters)
    assert engine.load_state_dict(state) == ([], []) and len(state) == len(saved)
    found = engine.full_state_dict()
    return all(torch.equal(value, found[name]) for name, value in saved.items()), later


def test_an_engine_that_trains_takes_the_weights_back(tmp_path: Path) -> None:
    """`HubState` has all names of a tie, of which the files have one: nothing is missing."""
    assert all(same for same, _ in run_ranks(4, load_into_a_running_engine, tmp_path))
