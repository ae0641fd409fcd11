"""Checkpoints that something went wrong with, at random: refused in so many words, or loaded right.

.venv/bin/python -m tests.checkpoint_fuzz 2000        by hand: some minutes

A manifest's text is changed, or its contents at any place, with or without its checksum made anew; files are changed,
cut short, replaced and swapped. Then the checkpoint is loaded into an engine, and each tensor rebuilt without one. Only
what somebody signed anew may say something else than was saved; that too must end in an error of ours or in none.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import zero3d
from tests import checkpoint_runs as runs
from tests import tiny
from tests.world import run_ranks
from zero3d.checkpoint.folders import whole
from zero3d.checkpoint.manifest import MANIFEST, _checksum
from zero3d.checkpoint.rebuild import Rebuilder
from zero3d.checkpoint.state import Holdings
from zero3d.errors import DataError, UsageError
from zero3d.models.gpt import GPT, GPTConfig

NAMES = (
    "",
    "..",
    "/etc/passwd",
    "../other",
    "rank-00001.safetensors",
    "F16",
    "I64",
    "U8",
    "weight",
    "state",
    "exp_avg",
)
VALUES = st.one_of(
    st.sampled_from([None, True, 0, 1, 2, -1, 4, 255, 2**31, 2**40, 2**62, 2**64, 10**30, 0.5, 1e308, -0.0]),
    st.sampled_from(NAMES),
    st.integers(-10, 10_000),
    st.text(max_size=5),
    st.sampled_from([[], {}, [0, 2**62], [2**62, 0], [1, 1], [[0, 1]], {"a": 1}]),
)
Snapshot = dict[str, Any]


def model() -> GPT:
    """With a padded vocabulary, and projections that are cut in both dims."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=61, sequence_length=tiny.LENGTH, width=16, layers=1, heads=2, tied=True))


def save_two(folder: Path) -> None:
    """`right`, and `before` it what is other in every tensor."""
    engine = zero3d.Engine(model(), runs.loss, runs.adamw, runs.Run((2, 2, 1), 1).options())
    for number, batch in enumerate(runs.batches()[:2]):
        runs.train(engine, [batch])
        engine.save(folder / ("before", "right")[number])


class Fuzzed:
    """One engine, into which all that is changed is loaded. folder: has what `save_two` saved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before, self._right = (next((folder / name).glob("step-*")) for name in ("before", "right"))
        self._engine = zero3d.Engine(model(), runs.loss, runs.adamw, {"parallel": {"micro_batch": 2}})
        self._engine.load(self._right)
        self._expected = self._snapshot()
        self._tensors = self._rebuilt(self._right)
        self._start()
        self.outside: list[str] = []
        self._watched = False
        sys.addaudithook(self._hear)
        self.refused = self.loaded = 0

    def check(self, data: st.DataObject) -> None:
        place = self._folder / "changed" / "step-00000009"
        shutil.rmtree(place.parent, ignore_errors=True)
        shutil.copytree(self._right, place)
        signed = change(place, self._before, data)
        for attempt in (self._load, self._rebuild):
            with self._watching():
                attempt(place, signed)
            assert not self.outside, self.outside

    def _load(self, place: Path, signed: bool) -> None:
        try:
            self._engine.load(place)
        except (DataError, UsageError) as error:
            assert error.message and error.hint, error
            _same(self._snapshot(), self._other)
            self.refused += 1
            return
        except Exception:
            self._start()  # What fails here is looked at again, in smaller and smaller cases.
            raise
        self.loaded += 1
        if not signed:
            _same(self._snapshot(), self._expected)
        self._start()

    def _rebuild(self, place: Path, signed: bool) -> None:
        try:
            found = self._rebuilt(place)
        except DataError:
            return
        if not signed:
            _same(found, self._tensors)

    def _start(self) -> None:
        self._engine.load(self._before)
        self._other = self._snapshot()

    def _rebuilt(self, place: Path) -> Snapshot:
        manifest = whole(place)[1]
        with Rebuilder(place, manifest) as rebuilder:
            return {f"{one.kind} {one.label}": rebuilder.tensor(one) for one in manifest.tensors}

    def _snapshot(self) -> Snapshot:
        """All that a checkpoint changes."""
        holdings = Holdings(self._engine._parts, self._engine._mesh)
        held = [*holdings.weights(), *holdings.states(), *holdings.buffers()]
        found: Snapshot = {f"{one.kind} {one.name} {one.key}": one.tensor.clone() for one in held}
        found |= {f"{name} {key}": float(value) for name, key, value in holdings.numbers()}
        return found | {"step": self._engine._steps, "scaler": self._engine._parts.scaler.state()}

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._watched and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = Path(os.fsdecode(arguments[0])).resolve()
            if not path.is_relative_to(self._folder.resolve()) and path.suffix not in (".py", ".pyc"):
                self.outside.append(str(path))

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._watched = True
        try:
            yield
        finally:
            self._watched = False


def change(place: Path, other: Path, data: st.DataObject) -> bool:
    """Something of the checkpoint at `place`. -> whether its manifest was signed anew. other: has files of the same
    names."""
    kind = data.draw(st.sampled_from(["text", "tree", "tree", "signed", "signed", "file"]))
    path = place / MANIFEST
    if kind == "file":
        names = sorted(one.name for one in place.iterdir())
        _change_file(place / data.draw(st.sampled_from(names)), other, data)
    elif kind == "text":
        path.write_bytes(_changed_bytes(path.read_bytes(), data))
    else:
        tree = json.loads(path.read_text())
        for _ in range(data.draw(st.integers(1, 3))):
            _change_tree(tree, data)
        if kind == "signed":
            tree.pop("checksum", None)
            tree = {"checksum": _checksum(tree), **tree}
        path.write_text(json.dumps(tree))
    return kind == "signed"


def _changed_bytes(found: bytes, data: st.DataObject) -> bytes:
    at = data.draw(st.integers(0, len(found) - 1))
    return data.draw(
        st.sampled_from(
            [
                found[:at],
                found[:at] + bytes([found[at] ^ 1 << data.draw(st.integers(0, 7))]) + found[at + 1 :],
                found[:at] + data.draw(st.binary(max_size=4)) + found[at + data.draw(st.integers(0, 4)) :],
                found + data.draw(st.binary(max_size=9)),
            ]
        )
    )


def _change_file(path: Path, other: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["bytes", "bytes", "bytes", "gone", "link", "folder", "older", "swapped"]))
    if kind == "bytes":
        path.write_bytes(_changed_bytes(path.read_bytes(), data))
        return
    if kind == "swapped":
        target = data.draw(st.sampled_from(sorted(path.parent.iterdir())))
        both = path.read_bytes(), target.read_bytes()
        target.write_bytes(both[0])
        path.write_bytes(both[1])
        return
    path.unlink()
    if kind == "link":
        path.symlink_to(data.draw(st.sampled_from(["/etc/passwd", str(other / path.name)])))
    elif kind == "folder":
        path.mkdir()
    elif kind == "older" and path.name != MANIFEST:
        shutil.copy(other / path.name, path)


def _change_tree(tree: Any, data: st.DataObject) -> None:
    """One place of it, however deep."""
    while True:
        keys = sorted(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        below = tree[key]
        if not isinstance(below, dict | list) or data.draw(st.integers(0, 5)) == 0:
            break
        tree = below
    kind = data.draw(st.sampled_from(["value", "value", "near", "gone", "twice", "other"]))
    if kind == "near" and isinstance(below, int):
        tree[key] = below + data.draw(st.sampled_from([-8, -4, -1, 1, 4, 8, 4096]))
    elif kind == "gone":
        del tree[key]
    elif kind == "twice":
        tree[key] = [below, below] if isinstance(tree, dict) else below
        if isinstance(tree, list):
            tree.insert(key, below)
    elif kind == "other":
        tree[key] = tree[data.draw(st.sampled_from(keys))]
    else:
        tree[key] = deepcopy(data.draw(VALUES))  # A later change may be inside of it.


def _same(found: Snapshot, expected: Snapshot) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        one = found[name]
        assert torch.equal(one, value) if isinstance(value, Tensor) else one == value, name


def campaign(folder: Path, number: int) -> tuple[int, int]:
    """-> how many were refused, and how many loaded."""
    fuzzed = Fuzzed(folder)

    @settings(
        max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        fuzzed.check(data)

    check()
    return fuzzed.refused, fuzzed.loaded


def fuzz(folder: Path, number: int, timeout: float = 60) -> tuple[int, int]:
    run_ranks(4, save_two, folder)
    [found] = run_ranks(1, campaign, folder, number, timeout=timeout)
    refused, loaded = found
    return refused, loaded


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        counts = fuzz(Path(place), int(sys.argv[1]), timeout=3000)
    sys.stdout.write("{} were refused, {} loaded\n".format(*counts))
