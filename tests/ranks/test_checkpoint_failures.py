"""What can go wrong with checkpoints: one error on every rank, which names the rank, the file and the way out; what was
saved before is as it was."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import nn

import zero3d
from tests.checkpoint_runs import resumed, saved
from tests.pipeline_runs import adamw
from tests.world import RankError, run_ranks
from zero3d.checkpoint import folders, mine, save
from zero3d.checkpoint.manifest import MANIFEST, _checksum
from zero3d.comm.roll import PATIENCE
from zero3d.errors import DataError, DivergedError, OutOfSpaceError, RankFailedError, UsageError, Zero3dError

pytestmark = [pytest.mark.alone, pytest.mark.ranks]

DATA = torch.ones(2, 64)


def squares(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.mean()


def made(seed: int = 0) -> zero3d.Engine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return zero3d.Engine(model, squares, adamw, {"parallel": {"micro_batch": 2}})


def raised(call: Callable[[], object]) -> tuple[str, str, float]:
    """(kind, text, seconds) of its error."""
    began = time.monotonic()
    try:
        call()
    except Zero3dError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("nothing was raised")


def left(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def on_one_rank(folder: Path) -> tuple[Any, list[float]]:
    engine = made()
    losses = [engine.step(DATA).loss]
    found = None
    if engine.rank == 0:
        found = raised(lambda: saved(engine, folder, step=1, patience=1.0))
    losses.append(engine.step(DATA).loss)
    if engine.rank == 1:
        found = raised(lambda: resumed(engine, folder, patience=0.5))
    saved(engine, folder, step=2)
    return found, losses


def test_a_call_on_some_ranks_only_names_the_others(tmp_path: Path) -> None:
    """And nothing has begun: training goes on, and the next call of all ranks is made."""
    (first, losses), (second, others) = run_ranks(2, on_one_rank, tmp_path)
    for (kind, text, seconds), call, rank in ((first, "save", 1), (second, "load", 0)):
        assert kind == DivergedError.__name__ and seconds < 10
        assert f"{call} is collective, and rank {rank} has not called it" in text
    assert losses == others and left(tmp_path) == ["step-00000002"]
    assert PATIENCE < 9


def in_other_ways(folder: Path) -> list[Any]:
    engine = made()
    engine.step(DATA)
    found = [
        raised(lambda: saved(engine, folder, step=1 + engine.rank)),
        raised(lambda: saved(engine, folder / str(engine.rank), step=1)),
        raised(lambda: saved(engine, folder, step=-1)),
        raised(lambda: saved(engine, folder, step=1, what="everything")),
        raised(lambda: saved(engine, folder, step=1, extra={"position": {1, 2}})),
        raised(lambda: saved(engine, folder, step=1, extra={"loss": float("nan")})),
    ]
    (folder / "file").touch()
    found.append(raised(lambda: saved(engine, folder / "file" / "below", step=1)))
    found.append(raised(lambda: resumed(engine, folder / "missing")))
    found.append(raised(lambda: resumed(engine, folder)))
    return [one[:2] for one in found]


def test_what_cannot_be_saved_is_refused_alike(tmp_path: Path) -> None:
    found, others = run_ranks(2, in_other_ways, tmp_path)
    assert found == others
    texts = [text for _, text in found]
    assert "rank 0 saves" in texts[0] and "rank 1 saves" in texts[0]
    assert "step = -1" in texts[2] and "all, weights, trainable" in texts[3]
    assert "extra cannot be saved" in texts[4] and "extra cannot be saved" in texts[5]
    assert str(tmp_path / "file") in texts[6]
    assert "no checkpoints" in texts[7] and "no checkpoint is in" in texts[8]
    assert left(tmp_path) == ["file"]


def denied(path: Path) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def full(path: Path) -> None:
    path.write_bytes(b"begun")
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def broken(path: Path) -> None:
    raise RuntimeError("a bug")


def writing_fails(folder: Path, problem: Callable[[Path], None]) -> tuple[Any, bool]:
    engine = made()
    engine.step(DATA)
    saved(engine, folder, step=1)
    real = mine.write
    if engine.rank == 1:
        mine.write = lambda plan, path, *_: problem(path)  # type: ignore[assignment, return-value]
    engine.step(DATA)
    error = raised(lambda: saved(engine, folder, step=2))
    mine.write = real
    other = made(1)
    good = resumed(other, folder).step == 1
    saved(engine, folder, step=2)
    return error, good


@pytest.mark.parametrize(
    ("problem", "kind", "text"),
    [
        (denied, UsageError, "rank 1: Permission denied"),
        (full, OutOfSpaceError, "rank 1: No space left on device"),
        (broken, RankFailedError, "rank 1: RuntimeError: a bug"),
    ],
)
def test_one_rank_cannot_write(tmp_path: Path, problem: Callable[[Path], None], kind: type, text: str) -> None:
    """All say so, at once; the checkpoint before is loaded, and the next save is made."""
    for (found, message, seconds), good in run_ranks(2, writing_fails, tmp_path, problem):
        assert found == kind.__name__ and text in message and seconds < 10 and good
        assert problem is broken or str(tmp_path) in message
    assert left(tmp_path) == ["step-00000001", "step-00000002"]


def with_little_room(folder: Path) -> Any:
    engine = made()
    saved(engine, folder, step=0)
    real, usage = shutil.disk_usage, shutil.disk_usage(folder)
    save.shutil.disk_usage = lambda path: usage._replace(free=1_050_000)  # type: ignore[attr-defined, assignment]
    found = raised(lambda: saved(engine, folder, step=1))
    save.shutil.disk_usage = real  # type: ignore[attr-defined]
    return found


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    for kind, text, _ in run_ranks(2, with_little_room, tmp_path):
        assert kind == OutOfSpaceError.__name__
        assert "MB are free" in text and str(tmp_path) in text
    assert left(tmp_path) == ["step-00000000"]


def dies_while_saving(folder: Path) -> None:
    engine = made()
    engine.step(DATA)
    saved(engine, folder, step=1)
    if engine.rank == 1:
        mine.write = lambda plan, path, *_: os._exit(1)  # type: ignore[assignment]
    saved(engine, folder, step=2)


def resumes(folder: Path) -> tuple[int, list[str], list[str]]:
    engine = made()
    loaded = resumed(engine, folder)
    before = left(folder) if engine.rank == 0 else []
    saved(engine, folder, step=7)
    return loaded.step, list(loaded.skipped), before


def test_a_rank_that_dies_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Rank 0 clears up, or if it died too the next save does."""
    with pytest.raises(RankError):
        run_ranks(2, dies_while_saving, tmp_path)
    (tmp_path / "step-00000003.tmp-0123abcd").mkdir()
    step, skipped, _ = run_ranks(2, resumes, tmp_path)[0]
    assert (step, skipped) == (1, [])
    assert left(tmp_path) == ["step-00000001", "step-00000007"]


def save_steps(folder: Path) -> None:
    engine = made()
    for step in (1, 2, 3):
        engine.step(DATA)
        saved(engine, folder, step=step)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("three")
    run_ranks(2, save_steps, folder)
    return folder


def flip(path: Path) -> None:
    file = path / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-6000] ^= 1
    file.write_bytes(data)


def cut_short(path: Path) -> None:
    os.truncate(path / "rank-00000.safetensors", 1000)


def change(path: Path, **keys: Any) -> None:
    tree = json.loads((path / MANIFEST).read_text()) | keys
    del tree["checksum"]
    (path / MANIFEST).write_text(json.dumps({"checksum": _checksum(tree), **tree}))


def another_version(path: Path) -> None:
    change(path, format=2)


def another_folder(path: Path) -> None:
    """A file that is there, outside."""
    files = json.loads((path / MANIFEST).read_text())["files"]
    files[0]["name"] = "../step-00000001/rank-00000.safetensors"
    change(path, files=files)


DAMAGES: dict[Callable[[Path], None], str] = {
    flip: "rank 1: bytes",
    cut_short: "1000 bytes, where",
    another_version: "has format 2",
    another_folder: "files.0.name",
}


def load_all(folders_: list[Path]) -> list[Any]:
    found = []
    for folder in folders_:
        engine = made(1)
        loaded = resumed(engine, folder)
        found.append((loaded.step, list(loaded.skipped), engine.step(DATA).loss))
    return found


def test_damaged_ones_give_way_to_the_one_before(tmp_path: Path, three: Path) -> None:
    """Which is then loaded whole; what was skipped is told, on every rank."""
    copies = [shutil.copytree(three, tmp_path / damage.__name__) for damage in DAMAGES]
    for folder, damage in zip(copies, DAMAGES):
        damage(folder / "step-00000003")
    good = shutil.copytree(three, tmp_path / "good")
    folders.keep(good, last=2)
    shutil.rmtree(good / "step-00000003")
    *found, expected = run_ranks(2, load_all, [*copies, good])[0]
    for (step, skipped, loss), text in zip(found, DAMAGES.values()):
        assert step == 2 and len(skipped) == 1
        assert skipped[0].startswith("step-00000003: ") and text in skipped[0]
        assert loss == expected[2]
    assert expected[:2] == (2, [])


def load_none(folder: Path) -> list[Any]:
    engine = made(1)
    engine.step(DATA)
    before = engine.full_state_dict()
    found = [raised(partial(resumed, engine, one))[:2] for one in (folder, folder / "step-00000003")]
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    other = made(1)
    other.step(DATA)
    assert engine.step(DATA * 2) == replace(other.step(DATA * 2), seconds=ANY)
    return found


def test_where_all_are_damaged_the_error_lists_them_and_nothing_has_changed(tmp_path: Path, three: Path) -> None:
    """On no rank, though the files of one are as they were written; training goes on bit by bit as it would have."""
    folder = shutil.copytree(three, tmp_path / "all")
    for step, damage in zip((1, 2, 3), (cut_short, flip, flip)):
        damage(folder / f"step-0000000{step}")
    found, others = run_ranks(2, load_none, folder)
    assert found == others
    for kind, text in found:
        assert kind == DataError.__name__ and "give another folder" in text
    assert all(f"step-0000000{step}" in found[0][1] for step in (1, 2, 3))
    assert "step-00000002" not in found[1][1]
