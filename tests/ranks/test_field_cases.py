"""How runs fail in the field, by case: saves that fail or are called on one rank, waits without end, logged losses.

C25 and C81 are in test_diverged.py, C40 in test_cases.py, what ranks log in one more form in test_case_numbers.py.
"""

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import zero3d
from tests import tiny
from tests.world import run_ranks
from zero3d.comm.guarded import GuardedBoard, UnansweredError, in_time
from zero3d.comm.mesh import open_mesh
from zero3d.errors import RankFailedError, Zero3dError
from zero3d.layout import Layout
from zero3d.records import RunFolder, TensorBoard, step_event

pytestmark = [pytest.mark.alone, pytest.mark.ranks]


def made(**options: Any) -> zero3d.Engine:
    return zero3d.Engine(tiny.tiny(layers=2), tiny.loss, tiny.adamw, options)


def raised(call: Callable[[], object]) -> tuple[str, float]:
    """(text, seconds) of its error."""
    began = time.monotonic()
    try:
        call()
    except Zero3dError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


# C5: save fails on one rank, and the others wait for ever.


def read_only(folder: Path) -> Callable[[], object]:
    """To this process alone. -> what undoes it."""
    libc, name = ctypes.CDLL(None, use_errno=True), os.fsencode(folder)
    private, bind, again = 0x4000 | (1 << 18), 0x1000, 0x1000 | 0x20 | 0x1
    assert not libc.unshare(0x00020000)
    assert not libc.mount(b"none", b"/", None, private, None)
    assert not libc.mount(name, name, None, bind, None)
    assert not libc.mount(name, name, None, again, None), ctypes.get_errno()
    return lambda: libc.umount2(name, 2)


def c5(folder: Path, how: str) -> tuple[str, float, list[str], list[float]]:
    """Of a save that rank 1 cannot write, what was there before it, and losses until after one that goes well."""
    engine = made(zero={"level": 1})
    batch = tiny.part(tiny.batches(1, 4)[0], engine.rank, 2)
    losses = [engine.step(batch).loss]
    engine.save(folder)
    losses.append(engine.step(batch).loss)
    undo: Callable[[], object] = lambda: None  # noqa: E731
    if engine.rank == 1 and how == "read-only":
        undo = read_only(folder)
    elif engine.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        undo = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)  # noqa: E731
    text, seconds = raised(lambda: engine.save(folder))
    undo()
    left = sorted(path.name for path in folder.iterdir())
    losses.append(engine.step(batch).loss)
    engine.save(folder)
    return text, seconds, left, losses


HOWS = ("full", *(["read-only"] if os.geteuid() == 0 else []))
"""Only root can make a folder one that rank 1 alone may not write to."""


@pytest.mark.parametrize("how", HOWS)
def test_c5_a_save_that_fails_on_rank_1_is_one_error_on_both_within_10_s(tmp_path: Path, how: str) -> None:
    found = run_ranks(2, c5, tmp_path, how)
    after = sorted(path.name for path in tmp_path.iterdir())
    (first, _, left, losses), (second, _, _, others) = found
    assert first == second and "rank 1" in first, found
    assert all(seconds < 10 for _, seconds, _, _ in found)
    assert left == ["step-00000001"] and after == ["step-00000001", "step-00000003"]
    assert losses == others


# C6: save under `if rank == 0`.


def c6(folder: Path) -> tuple[str, float, list[float]]:
    engine = made(zero={"level": 3})
    batch = tiny.part(tiny.batches(1, 4)[0], engine.rank, 2)
    losses = [engine.step(batch).loss]
    text, seconds = raised(lambda: engine.save(folder)) if engine.rank == 0 else ("", 0.0)
    return text, seconds, [*losses, engine.step(batch).loss]


def test_c6_a_save_on_rank_0_alone_says_that_it_is_collective_and_who_is_missing(tmp_path: Path) -> None:
    """Nothing has begun, and training goes on."""
    (text, seconds, losses), (_, _, others) = run_ranks(2, c6, tmp_path)
    assert "save is collective, and rank 1 has not called it" in text and seconds < 10, (text, seconds)
    assert losses == others and not list(tmp_path.iterdir())


# C81: a wait that nobody ends.


def waits(seconds: float) -> tuple[str, float]:
    """Rank 3 comes late to where ranks 1 and 2 wait for it, over axes that are parts of the world."""
    mesh = open_mesh(Layout(dp=2, tp=2), timedelta(seconds=3))
    axis = {1: "dp", 2: "tp"}.get(mesh.rank, "")
    if not axis:
        time.sleep(seconds if mesh.rank == 3 else 0)
        return "", 0.0
    everyone = torch.empty(2)
    return raised(lambda: mesh.axes[axis].all_gather(everyone, torch.ones(1), "weights").wait())


def test_c81_groups_within_the_world_have_the_time_out_of_the_run() -> None:
    """Those of a DeviceMesh wait for torch's half an hour."""
    found = run_ranks(4, waits, 9.0)
    for text, seconds in found[1:3]:
        assert "rank 3 did not join the all-gather of weights within the time-out" in text and seconds < 8, found


class Cut:
    """A store whose link can be cut: then it does not answer, nor does it fail."""

    def __init__(self) -> None:
        self.link = threading.Event()
        self.link.set()
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self.link.wait()
        self.kept[key] = value

    def get(self, key: str, /) -> bytes:
        self.link.wait()
        return self.kept[key].encode()

    def check(self, keys: list[str], /) -> bool:
        self.link.wait()
        return all(key in self.kept for key in keys)

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        self.link.wait()
        return self.kept.setdefault(key, value).encode()

    def add(self, key: str, amount: int, /) -> int:
        self.link.wait()
        raise ValueError("no number")


def test_c81_a_store_behind_a_cut_link_is_no_wait_without_end() -> None:
    """A rank that had waited for another until the time-out then asked the store what that did, and never came back."""
    store = Cut()
    board = GuardedBoard(store, 0.5)
    board.set("a", "1")
    assert board.get("a") == b"1" and board.check(["a"]) and not board.check(["b"])
    with pytest.raises(ValueError, match="no number"):
        board.add("a", 1)
    store.link.clear()
    began = time.monotonic()
    for call in (lambda: board.set("b", "2"), lambda: board.check(["a"]), lambda: board.get("a")):
        with pytest.raises(UnansweredError, match="has not answered for"):
            call()
    assert time.monotonic() - began < 2.5
    threading.Timer(1.0, store.link.set).start()
    assert board.patient(10.0).get("b") == b"2", "who can wait is answered, and what was asked before is done"
    assert board.get("b") == b"2", "the link is there again"


def test_c81_ranks_that_cannot_meet_say_so() -> None:
    with pytest.raises(RankFailedError, match="the meeting of all ranks has not come to an end"):
        in_time(0.2, threading.Event().wait, "the meeting of all ranks")
    with pytest.raises(KeyError):
        in_time(5, lambda: {}["a"], "a")
    assert in_time(5, lambda: 3, "three") == 3


# C83: the logged loss is that of one rank, or of ranks that count alike whatever their tokens.


def c83(folder: Path) -> tuple[float, float]:
    """The losses of the step's line and of TensorBoard, which rank 0 writes; of the other rank its report's."""
    engine = made()
    report = engine.step(tiny.part(uneven(), engine.rank, 2))
    if engine.rank != 0:
        return report.loss, report.loss
    records, board = RunFolder(folder), TensorBoard(folder)
    board.started(cast(Any, SimpleNamespace(config=engine.config)))
    board.stepped(report)
    board.close()
    assert records.folder == folder
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(folder.rglob("events.*")).parent)).Reload()
    return cast(float, step_event(report)["loss"]), events.Scalars("train/loss")[0].value


def uneven() -> dict[str, torch.Tensor]:
    """Rank 0's two samples have 3 targets, rank 1's 17."""
    batch = tiny.batches(1, 4)[0]
    targets = batch["targets"].clamp(min=0)
    for row, counted in enumerate((1, 2, 8, 9)):
        targets[row, counted:] = -100
    return {"tokens": batch["tokens"], "targets": targets}


def test_c83_the_step_line_and_tensorboard_have_the_loss_of_all_targets(tmp_path: Path) -> None:
    """The plain sum over 3 and 17 targets, divided by 20, in one process."""
    with torch.no_grad():
        total, count = tiny.loss(tiny.tiny(layers=2)(uneven()["tokens"]), uneven())
    assert int(count) == 20
    for line, scalar in run_ranks(2, c83, tmp_path):
        assert line == pytest.approx(float(total / count), rel=1e-6)
        assert scalar == pytest.approx(float(total / count), rel=1e-6)
