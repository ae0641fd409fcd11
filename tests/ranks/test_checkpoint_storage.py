"""Checkpoints at a URL: the bytes are those of a folder's, the manifest makes them whole, and what a remote refuses is
told with the URL; what was saved before is as it was.

`odd://` is a folder behind fsspec that all ranks reach, notes what is done to it, and refuses what it is told to.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import zero3d
from tests.checkpoint_runs import Run, made, resumed, saved
from tests.checkpoint_runs import loss as token_loss
from tests.pipeline_runs import adamw
from tests.world import RankError, run_ranks
from zero3d.checkpoint import folders, mine
from zero3d.checkpoint.manifest import MANIFEST
from zero3d.checkpoint.place import Url, place
from zero3d.checkpoint.remote import Remote
from zero3d.config import Config
from zero3d.errors import ConfigError, DataError, OutOfSpaceError, UsageError, Zero3dError
from zero3d.resuming import Checkpoints

pytestmark = pytest.mark.ranks

DATA = torch.ones(2, 64)


class Odd(LocalFileSystem):  # type: ignore[misc]
    """events: what was done, and to which file; refuse: (what, part of a name) -> what is raised."""

    protocol = "odd"
    events: list[tuple[str, str]]
    refuse: dict[tuple[str, str], Exception]
    events, refuse = [], {}

    def _note(self, what: str, path: str) -> None:
        self.events.append((what, Path(path).name))
        for (refused, part), error in self.refuse.items():
            if what == refused and part in path:
                raise error

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._note("write" if "w" in mode else "open", path)
        return super()._open(path, mode, **options)

    def info(self, path: Any, **options: Any) -> Any:
        if isinstance(path, str):  # Not an entry of a folder that is listed.
            self._note("info", path)
        return super().info(path, **options)

    def rm_file(self, path: str) -> None:
        self._note("remove", path)
        super().rm_file(path)


class Shop(MemoryFileSystem):  # type: ignore[misc]
    """Has buckets, as object stores have."""

    protocol = "shop"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return str(path).removeprefix("shop://").strip("/")


fsspec.register_implementation("odd", Odd, clobber=True)
fsspec.register_implementation("shop", Shop, clobber=True)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    Odd.events.clear()
    Odd.refuse.clear()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def odd(folder: Path) -> str:
    return f"odd://{folder}"


def squares(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.mean()


def small(seed: int = 0, **options: Any) -> zero3d.Engine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return zero3d.Engine(model, squares, adamw, {"parallel": {"micro_batch": 2}, **options})


def raised(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Zero3dError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def alone(work: Callable[..., Any], *args: Any) -> Any:
    return run_ranks(1, work, *args)[0]


def save_both(folder: Path, run: Run) -> None:
    engine = zero3d.Engine(made(), token_loss, adamw, run.options())
    saved(engine, folder / "path", step=3)
    assert saved(engine, odd(folder / "url"), step=3) == Url(f"{odd(folder / 'url')}/step-00000003")  # type: ignore[arg-type]


def load_both(folder: Path, run: Run) -> Any:
    found = []
    for where in (folder / "path", odd(folder / "url")):
        engine = zero3d.Engine(made(), token_loss, adamw, run.options())
        loaded = resumed(engine, where)  # type: ignore[arg-type]
        found.append((engine.full_state_dict(), loaded.bytes_read, loaded.step))
    return found


def test_a_url_has_the_bytes_of_a_folder_and_loads_on_any_layout(tmp_path: Path) -> None:
    """Every bit: the same files but for their names, and the same weights in another layout."""
    run_ranks(2, save_both, tmp_path, Run((1, 2, 1), 2))
    [one], [other] = (list((tmp_path / kind).iterdir()) for kind in ("path", "url"))
    texts = [json.loads((path / MANIFEST).read_text()) for path in (one, other)]
    for file, twin in zip(*(text["files"] for text in texts), strict=True):
        assert (one / file["name"]).read_bytes() == (other / twin["name"]).read_bytes()
        file["name"] = twin["name"] = ""
    assert {**texts[0], "checksum": ""} == {**texts[1], "checksum": ""}
    assert len(names(other)) == 3 and len(names(tmp_path / "url")) == 1
    for local, remote in run_ranks(2, load_both, tmp_path, Run((2, 1, 1), 3)):
        assert local[1:] == remote[1:] and local[2] == 3
        assert all(torch.equal(value, remote[0][name]) for name, value in local[0].items())


def refused_while_saving(folder: Path, what: str, name: str, error: Exception) -> Any:
    engine = small(zero={"level": 3})
    saved(engine, odd(folder), step=1)  # type: ignore[arg-type]
    before = engine.weight_of("0.weight")
    engine.step(DATA)
    Odd.refuse[what, name] = error
    found = raised(lambda: saved(engine, odd(folder), step=1))  # type: ignore[arg-type]
    Odd.refuse.clear()
    left = names(folder / "step-00000001") if engine.rank == 0 else []
    after = engine.weight_of("0.weight")
    resumed(engine, odd(folder))  # type: ignore[arg-type]
    unharmed = torch.equal(engine.weight_of("0.weight"), before) and not torch.equal(before, after)
    engine.step(DATA)
    saved(engine, odd(folder), step=1)  # type: ignore[arg-type]
    return found, unharmed, left


@pytest.mark.parametrize(
    ("what", "name", "error", "kind", "text"),
    [
        ("write", "rank-00001", PermissionError(13, "not yours"), UsageError, "rank 1: it cannot be written"),
        ("write", "rank-00001", OSError(errno.ENOSPC, "full"), OutOfSpaceError, "rank 1: it cannot be written"),
        ("write", MANIFEST, RuntimeError("code 503"), UsageError, "RuntimeError: code 503"),
        ("info", "rank-00001", ConnectionError("gone"), UsageError, "ConnectionError: gone"),
    ],
)
def test_what_the_remote_refuses_leaves_the_one_of_the_same_step(
    tmp_path: Path, what: str, name: str, error: Exception, kind: type, text: str
) -> None:
    """All ranks say so and name the URL; nothing is left of the save; the next one takes the old one's place."""
    results = run_ranks(2, refused_while_saving, tmp_path, what, name, error)
    for (found, message), unharmed, _ in results:
        assert found == kind.__name__ and unharmed
        assert text in message and odd(tmp_path / "step-00000001") in message
    assert len(results[0][2]) == 3
    assert not set(names(tmp_path / "step-00000001")) & set(results[0][2]) - {MANIFEST}
    assert len(names(tmp_path / "step-00000001")) == 3


def dies(folder: Path) -> None:
    engine = small()
    saved(engine, odd(folder), step=1)  # type: ignore[arg-type]
    if engine.rank == 1:
        mine.write = lambda *written: os._exit(1)  # type: ignore[assignment]
    else:  # It cannot clear away any more.
        Remote.discard = lambda self, draft: None  # type: ignore[method-assign]
    saved(engine, odd(folder), step=2)  # type: ignore[arg-type]


def goes_on(folder: Path) -> Any:
    engine = small(1)
    loaded = resumed(engine, odd(folder))  # type: ignore[arg-type]
    saved(engine, odd(folder), step=3)  # type: ignore[arg-type]
    return loaded.step, list(loaded.skipped)


def test_without_a_manifest_there_is_no_checkpoint_and_the_next_save_clears_it_away(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(2, dies, tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    step, skipped = run_ranks(2, goes_on, tmp_path)[0]
    assert step == 1 and len(skipped) == 1 and skipped[0].startswith("step-00000002: no manifest")
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def three(folder: Path) -> list[tuple[str, str]]:
    """-> what was done for the last."""
    engine = small()
    for step in (1, 2, 3):
        Odd.events.clear()
        saved(engine, odd(folder), step=step)  # type: ignore[arg-type]
    return list(Odd.events)


def test_the_manifest_is_written_last_and_removed_first(tmp_path: Path) -> None:
    events = alone(three, tmp_path)
    written = [name for what, name in events if what == "write"]
    assert len(written) == 2 and written[0].startswith("rank-00000-") and written[1] == MANIFEST
    assert ("info", written[0]) in events[events.index(("write", written[0])) : events.index(("write", MANIFEST))]
    removed = folders.keep(Url(odd(tmp_path)), last=2)
    assert [str(one) for one in removed] == [odd(tmp_path / "step-00000001")]
    assert next(name for what, name in Odd.events if what == "remove") == MANIFEST
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def loads_damaged(folder: Path) -> Any:
    engine = small(1)
    loaded = resumed(engine, odd(folder))  # type: ignore[arg-type]
    return loaded.step, list(loaded.skipped)


def loads_unreachable(folder: Path, what: str) -> Any:
    engine = small(1)
    Odd.refuse[what, "step-00000003"] = ConnectionError("gone")
    told = [
        raised(lambda: resumed(engine, odd(folder))),  # type: ignore[arg-type]
        raised(lambda: saved(engine, odd(folder), step=4)),  # type: ignore[arg-type]
        raised(lambda: resumed(engine, odd(folder / "missing"))),  # type: ignore[arg-type]
    ]
    Odd.refuse.clear()
    return told, names(folder), resumed(engine, odd(folder)).step  # type: ignore[arg-type]


def test_what_is_damaged_gives_way_and_what_cannot_be_reached_does_not(tmp_path: Path) -> None:
    """Else a line that is down would cost steps, where an older one is gone on from, or a checkpoint, cleared away."""
    alone(three, tmp_path)
    told, left, step = alone(loads_unreachable, tmp_path, "info")
    assert step == 3 and left == ["step-00000001", "step-00000002", "step-00000003"]
    for kind, text in told[:2]:
        assert kind == UsageError.__name__ and "ConnectionError: gone" in text
        assert odd(tmp_path / "step-00000003") in text
    assert told[2][0] == DataError.__name__ and "there are no checkpoints: No such file" in told[2][1]
    [file] = (tmp_path / "step-00000003").glob("rank-*")
    data = bytearray(file.read_bytes())
    data[-9000] ^= 1
    file.write_bytes(data)
    [file] = (tmp_path / "step-00000002").glob("rank-*")
    os.truncate(file, 1000)
    step, skipped = alone(loads_damaged, tmp_path)
    assert step == 1 and "are not what was written" in skipped[0] and "1000 bytes" in skipped[1]


def in_memory(where: str) -> Any:
    """A run that saves in the background as `[checkpoint]` says, and one that goes on from there."""
    options = {"checkpoint": {"folder": where, "every": 2, "keep": 1}}
    engine = small(zero={"level": 1}, **options)
    checkpoints = Checkpoints(engine)
    assert checkpoints.resume() is None
    checkpoints.begin(None)
    for step in range(1, 7):
        engine.step(DATA)
        checkpoints.stepped(step, last=step == 6)
    last, weight, loss = checkpoints.last, engine.weight_of("0.weight"), engine.step(DATA).loss
    again = small(1, zero={"level": 3}, **options)
    refused = raised(lambda: Checkpoints(again).begin(None))
    loaded = Checkpoints(again).resume()
    assert loaded is not None
    same = torch.equal(again.weight_of("0.weight"), weight) and again.step(DATA).loss == loss
    return loaded.step, same, str(last), refused, Remote(Url(where)).folders()


def test_a_run_goes_on_from_a_remote() -> None:
    """Its numbers are those of one that was not interrupted. `memory://` is a process's own."""
    where = "memory://run/one"
    step, same, last, refused, left = alone(in_memory, where)
    assert step == 6 and same and left == ["step-00000006"]
    assert last == str(Url(where) / "step-00000006")
    assert refused[0] == UsageError.__name__ and "checkpoints of another run" in refused[1] and where in refused[1]


def in_buckets() -> Any:
    engine = small()
    refused = raised(lambda: engine.save("shop://bucket/run"))
    made_up = Shop().ls("", detail=False)
    Shop().makedirs("bucket")
    engine.save("shop://bucket/run")
    return refused, made_up, engine.load("shop://bucket/run").path


def test_a_bucket_is_never_made() -> None:
    """Its name was mistyped."""
    refused, made_up, path = alone(in_buckets)
    assert refused[0] == UsageError.__name__ and "there is no bucket" in refused[1] and made_up == []
    assert path == Url("shop://bucket/run/step-00000000")


def without_fsspec() -> list[tuple[str, str]]:
    engine = small()
    unknown = raised(lambda: engine.save("nowhere://run"))
    sys.modules["fsspec.core"] = None  # type: ignore[assignment]
    missing = [raised(lambda: engine.save("memory://run")), raised(lambda: engine.load("memory://run"))]
    path = raised(lambda: engine.load("missing"))
    return [unknown, *missing, path]


def test_what_is_not_installed_is_told() -> None:
    """And without a URL nothing asks for it."""
    unknown, *missing, path = alone(without_fsspec)
    assert unknown[0] == UsageError.__name__ and "nowhere" in unknown[1]
    for kind, text in missing:
        assert kind == UsageError.__name__ and "fsspec" in text and "zero3d[remote]" in text and "memory://run" in text
    assert path[0] == DataError.__name__


def test_which_texts_are_urls(tmp_path: Path) -> None:
    assert place("s3://bucket/run/") == Url("s3://bucket/run") and place("runs/one") == Path("runs/one")
    assert place(f"file://{tmp_path}") == tmp_path and place(tmp_path) == tmp_path
    assert str(place("memory://")) == "memory://" and str(Url("memory://") / "run") == "memory://run"
    below = Url("s3://bucket/run") / "step-00000001"
    assert (below.name, str(below.parent)) == ("step-00000001", "s3://bucket/run")
    for wrong in ("file://run", "simplecache::s3://bucket/run", Path("s3://bucket/run")):
        with pytest.raises(UsageError):
            place(wrong)
    for section in ({"checkpoint": {"folder": "s3://"}}, {"checkpoint": {"folder": ""}}, {"run": {"out": "s3://b/r"}}):
        with pytest.raises(ConfigError):
            Config.load(section)
    assert Config.load({"checkpoint": {"folder": "s3://bucket/run"}}).checkpoint.folder == "s3://bucket/run"
