"""Saves in the background (C17): what is saved is what was there at the call, whatever is done at once afterwards.

None of it is left to luck: `pace` lets the writing go on only once the steps are over, or once an update wants to
change what is still to be written. Files are compared in every byte with those of a save that was waited for.
"""

import errno
import gc
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests.pipeline_runs import adamw
from tests.world import run_ranks
from zero3d.checkpoint import folders, mine, save
from zero3d.checkpoint.manifest import File
from zero3d.checkpoint.snapshot import ROOM, Snapshot
from zero3d.checkpoint.write import Out, Plan, write
from zero3d.contracts import OptimizerChoice
from zero3d.errors import OutOfSpaceError, RankFailedError, UsageError, Zero3dError
from zero3d.zero.shard import Shard

pytestmark = pytest.mark.ranks

WIDTH, BEFORE, AFTER = 24, 2, 3
SMALL = 4 * WIDTH * WIDTH
"""Room for one of the model's matrices."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("calls").add_(1.0)
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """Blocks with buffers that change with every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum() + output.sum(), len(output)


def momentum(parameters: Sequence[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True)


def rmsprop(parameters: Sequence[Any]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5, centered=True)


def muon(parameters: Sequence[Any]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=1e-2)


@dataclass(frozen=True)
class Case:
    level: int
    optimizer: OptimizerChoice = adamw
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def engine(self, folder: Path) -> zero3d.Engine:
        """`folder`: where what it keeps on disk lies."""
        torch.manual_seed(0)
        zero = {"level": self.level, "bucket_mb": 0.005, **self.options.get("zero", {})}
        options = {"parallel": {"micro_batch": 4}, **self.options, "zero": zero}
        if self.options.get("offload", {}).get("optimizer") == "disk":
            options["offload"] = {**self.options["offload"], "folder": str(folder / "disk")}
        return zero3d.Engine(Net(), loss, self.optimizer, options)


HOMES: dict[str, dict[str, Any]] = {
    "host": {"optimizer": "host"},
    "disk": {"optimizer": "disk"},
    "half": {"optimizer": "host", "fraction": 0.5},
    "delayed": {"optimizer": "host", "delayed_update": 1},
}
CASES = {
    **{f"level {level}": Case(level) for level in range(4)},
    **{
        f"{name}, level {level}": Case(level, options={"offload": home})
        for name, home in HOMES.items()
        for level in ((1, 3) if name == "host" else (2,))
    },
    "momentum": Case(3, momentum),
    "rmsprop": Case(0, rmsprop),
    "rmsprop, host": Case(2, rmsprop, {"offload": {"optimizer": "host"}}),
    **{
        f"muon, level {level}": Case(
            level,
            {"blocks.*.up.weight": muon, "blocks.*.down.weight": muon, "*": "adamw"},
            {"zero": {"whole_parameters": ["auto"]}},
        )
        for level in (0, 2)
    },
}
NAMES = {
    0: ("level 0", "host, level 3", "delayed, level 2", "muon, level 2"),
    SMALL: ("level 3", "disk, level 2", "muon, level 0"),
    ROOM: tuple(CASES),
}
"""By room. Where it is little, updates wait for what is written."""


def batch(engine: zero3d.Engine, step: int) -> Tensor:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
    return x.chunk(engine.dp_size)[engine.dp_index]


def train(engine: zero3d.Engine, steps: range) -> list[float]:
    return [engine.step(batch(engine, step)).loss for step in steps]


def pace(go: threading.Event, *, room: int = ROOM, asked: threading.Event | None = None) -> None:
    """From now on, on this rank, saves have so much room for copies and write nothing before `go`; `asked` is set when
    an update first wants to change something. (A rank is a process that ends with its test.)"""

    class Paced(Snapshot):
        def __init__(self, outs: Sequence[Out], owners: Mapping[str, Shard | None]) -> None:
            super().__init__(outs, owners, room)

        @contextmanager
        def source(self, out: Out) -> Iterator[Tensor]:
            assert go.wait(20), "nobody let it go on"
            with super().source(out) as tensor:
                yield tensor

        def before_update(self, shard: Shard) -> None:
            if asked is not None:
                asked.set()
            super().before_update(shard)
            assert sum(copy.nbytes for copy in self._copies.values()) <= room, "copies take more than they may"

    save.Snapshot = Paced  # type: ignore[misc]


def files(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in sorted(folder.glob("*.safetensors"))}


def at_the_call(folder: Path, case: Case, room: int) -> dict[str, list[Any]]:
    """Pairs of what should be equal, by what they are."""
    engine = case.engine(folder)
    train(engine, range(BEFORE))
    waited_for = engine.save(folder / "waited for")
    state = {name: value.clone() for name, value in engine.full_state_dict().items()}
    go, asked = threading.Event(), threading.Event()
    # With little room an update waits for what is written, which begins when the update wants to.
    pace(asked if room < ROOM else go, room=room, asked=asked)
    extra = {"list": [1]}
    saved = engine.save(folder / "background", background=True, extra=extra)
    extra["list"].append(2)
    losses = train(engine, range(BEFORE, BEFORE + AFTER))
    engine._parts.replica.settle()
    assert asked.is_set(), "updates ask first"
    go.set()
    engine.finish_saving()
    ended = engine.full_state_dict()
    engine.close()
    again = case.engine(folder)
    loaded = again.load(folder / "background")
    found = {
        "files": [files(saved), files(waited_for)],
        "steps": [loaded.step, BEFORE],
        "extra": [loaded.extra, {"list": [1]}],
        "state": [as_bytes(again.full_state_dict()), as_bytes(state)],
        "losses": [train(again, range(BEFORE, BEFORE + AFTER)), losses],
        "end": [as_bytes(again.full_state_dict()), as_bytes(ended)],
    }
    again.close()
    return found


def as_bytes(state: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in state.items()}


def all_at_the_call(folder: Path, room: int) -> dict[str, dict[str, list[Any]]]:
    return {name: at_the_call(folder / name, CASES[name], room) for name in NAMES[room]}


@pytest.mark.parametrize("room", [0, SMALL, ROOM], ids=["no room", "little room", "room"])
def test_c17_a_file_has_what_was_there_at_the_call(tmp_path: Path, room: int) -> None:
    """In every bit: weights, optimizer state and buffers at the call, although three steps follow at once; and a run
    that is loaded goes on as the one that was saved."""
    for rank, found in enumerate(run_ranks(2, all_at_the_call, tmp_path, room)):
        for name, pairs in found.items():
            for what, (first, second) in pairs.items():
                assert first == second, (rank, name, what)
            assert len(pairs["files"][0]) == 2 and pairs["end"][0] != pairs["state"][0], "there was something to see"


def updates_that_are_late(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The updates of a step begin, on their own thread, once the save is already being waited for."""
    engine = CASES["host, level 3"].engine(folder)
    train(engine, range(BEFORE))
    waited_for = files(engine.save(folder / "waited for"))
    go, waits = threading.Event(), threading.Event()
    pace(go)
    ask = engine._saves.before_update

    def late(shard: Shard) -> None:
        assert waits.wait(20)
        ask(shard)

    engine._parts.optimizer.ask_before_update(late)
    saved = engine.save(folder / "background", background=True)
    train(engine, range(BEFORE, BEFORE + 1))

    def let_go() -> None:
        waits.set()
        engine._parts.replica.settle()
        go.set()

    # What this rank waits for is told by nobody; a moment later it does.
    threading.Timer(0.2, let_go).start()
    engine.finish_saving()
    return files(saved), waited_for


def test_updates_that_still_go_on_while_a_save_is_waited_for_ask_first(tmp_path: Path) -> None:
    """With offload a step returns before its updates are made. Waiting for the save used to end the asking at once, and
    such an update changed what was still to be written."""
    for found, expected in run_ranks(2, updates_that_are_late, tmp_path):
        assert found == expected


def many(folder: Path) -> tuple[float, float, int]:
    """Bytes that 50 saves made this process grow by, those of one save's copies, and checkpoints in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(192, 192) for _ in range(8)))
    engine = zero3d.Engine(model, loss, adamw, {"zero": {"level": 1}, "parallel": {"micro_batch": 4}})
    data = torch.ones(4, 192)
    grown, process = 0, psutil.Process()
    for number in range(60):
        engine.save(folder, background=True)
        engine.step(data)
        if engine.rank == 0:
            folders.keep(folder, last=2)
        if number == 9:  # From here on all buffers are there.
            gc.collect()
            grown = process.memory_info().rss
    engine.finish_saving()
    gc.collect()
    grown = process.memory_info().rss - grown
    copies = sum(3 * shard.master.nbytes for shard in engine._parts.replica.shards)
    return grown, copies, len(folders.candidates(folder))


def test_c17_50_saves_leave_nothing_in_memory(tmp_path: Path) -> None:
    """Less than 20 MB, where the copies of 50 would be 89 MB."""
    for grown, copies, left in run_ranks(2, many, tmp_path):
        assert grown < 20e6 < 80e6 < 50 * copies
        assert left <= 3


def two(folder: Path) -> tuple[list[bool], list[bool]]:
    engine = CASES["level 2"].engine(folder)
    go = threading.Event()
    pace(go)
    first = engine.save(folder, background=True)
    before = [first.exists(), go.is_set()]
    train(engine, range(1))
    threading.Timer(0.3, go.set).start()
    second = engine.save(folder, background=True)
    after = [first.exists(), go.is_set()]
    engine.finish_saving()
    return before, [*after, second.exists(), folders.newest(folder).path == second]


def test_c17_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    for before, after in run_ranks(2, two, tmp_path):
        assert before == [False, False] and after == [True] * 4


def full(*_: Any) -> File:
    raise OSError(errno.ENOSPC, "No space left on device", "a disk")


def broken(*_: Any) -> File:
    raise RuntimeError("it broke")


def in_the_way(planned: Plan, path: Path, *more: Any) -> File:
    """There is a file of that name already."""
    path.touch()
    return write(planned, path, *more)


def taken_away(planned: Plan, path: Path, *more: Any) -> File:
    """Somebody removes the folder that is being written to."""
    shutil.rmtree(path.parent)
    return write(planned, path, *more)


FAULTS = {
    "no space": (full, OutOfSpaceError, "rank 1: No space left on device"),
    "another error": (broken, RankFailedError, "rank 1: RuntimeError: it broke"),
    "a file in the way": (in_the_way, UsageError, "rank 1: File exists"),
    "taken away": (taken_away, UsageError, ": No such file or directory"),
}


def fails(folder: Path, writes: Callable[..., File]) -> dict[str, Any]:
    """Rank 1 writes by this, once."""
    engine = CASES["host, level 3"].engine(folder)
    kept = engine.save(folder / "saved")
    contents = files(kept)
    if engine.rank == 1:
        mine.write = writes  # type: ignore[assignment]
    losses = train(engine, range(1))
    engine.save(folder / "saved", background=True)
    raised: tuple[str, str, int] | None = None
    while raised is None and len(losses) < 200:
        try:
            losses += train(engine, range(len(losses), len(losses) + 1))
        except Zero3dError as error:
            raised = type(error).__name__, str(error), len(losses)
    mine.write = write
    losses += train(engine, range(len(losses), len(losses) + 2))
    again = engine.save(folder / "saved")
    left = sorted(one.name for one in (folder / "saved").iterdir())
    engine.close()
    straight = CASES["host, level 3"].engine(folder)
    return {
        "raised": raised,
        "losses": losses,
        "expected": train(straight, range(len(losses))),
        "left": left,
        "names": sorted([kept.name, again.name]),
        "unharmed": files(kept) == contents,
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_what_went_wrong_on_one_rank_is_raised_by_a_later_step_of_all(tmp_path: Path, fault: str) -> None:
    """The same text at the same step, which has not been made; calling it again makes it, and the next save succeeds.
    Nothing is left of the one that failed, and the one before is unharmed."""
    writes, kind, text = FAULTS[fault]
    ranks = run_ranks(2, fails, tmp_path, writes)
    assert ranks[0]["raised"] == ranks[1]["raised"]
    for found in ranks:
        assert found["raised"] is not None, "no step has raised it"
        assert found["raised"][0] == kind.__name__ and text in found["raised"][1]
        assert found["losses"] == found["expected"]
        assert found["left"] == found["names"] and found["unharmed"]


def sets(engine: zero3d.Engine) -> None:
    engine.set_weight("leave.bias", torch.ones(3))


def loads(engine: zero3d.Engine) -> None:
    engine.load_state_dict({name: torch.ones_like(value) for name, value in Net().state_dict().items()})


def edits(engine: zero3d.Engine) -> None:
    def change(model: nn.Module) -> None:
        model.get_submodule("leave").register_parameter("bias", nn.Parameter(torch.ones(3)))
        with torch.no_grad():
            model.get_parameter("leave.weight").fill_(1.0)

    engine.edit(change)


def writes(engine: zero3d.Engine) -> None:
    with engine.gathered(write=True) as model:
        for parameter in model.parameters():
            parameter.fill_(1.0)


def goes_back(engine: zero3d.Engine, folder: Path) -> None:
    engine.load(folder)


def changed_meanwhile(folder: Path, level: int) -> list[tuple[str, bool, bool, bool]]:
    """(what, whether it waited, whether the file is as it should be, whether the weights have changed)."""
    found = []
    engine = CASES[f"level {level}"].engine(folder)
    engine.save(folder / "start")
    for change in (sets, loads, writes, edits, lambda engine: goes_back(engine, folder / "start")):
        train(engine, range(1))
        waited_for = engine.save(folder / "waited for")
        before = as_bytes(engine.full_state_dict())
        go = threading.Event()
        snapshot = save.Snapshot
        pace(go)
        saved = engine.save(folder / "background", background=True)
        timer = threading.Timer(0.2, go.set)
        timer.start()
        change(engine)
        waited = go.is_set() and saved.exists()
        timer.join()
        engine.finish_saving()
        save.Snapshot = snapshot  # type: ignore[misc]
        same = files(saved) == files(waited_for)
        found.append((change.__name__, waited, same, as_bytes(engine.full_state_dict()) != before))
    return found


@pytest.mark.parametrize("level", [0, 3])
def test_changes_that_are_made_meanwhile_wait_and_are_not_in_the_file(tmp_path: Path, level: int) -> None:
    for found in run_ranks(2, changed_meanwhile, tmp_path, level):
        for what, waited, same, changed in found:
            assert waited and same and changed, (what, waited, same, changed)


def saves_within(folder: Path) -> tuple[str, list[str]]:
    engine = CASES["level 1"].engine(folder)
    told = ""
    with engine.gathered(write=True) as model:
        next(model.parameters()).fill_(1.0)
        try:
            engine.save(folder / "saved", background=True)
        except UsageError as error:
            told = str(error)
    with engine.gathered():
        engine.save(folder / "saved", background=True)
    engine.finish_saving()
    return told, [one.name for one in (folder / "saved").iterdir()]


def test_there_is_no_save_while_the_model_is_being_written_to(tmp_path: Path) -> None:
    """It would have what was written so far on this rank, where levels keep weights in one place, and not elsewhere."""
    for told, left in run_ranks(2, saves_within, tmp_path):
        assert "engine.save inside `with engine.gathered(write=True)`" in told and "Leave it first" in told
        assert left == ["step-00000000"]


def closes(folder: Path) -> list[str]:
    engine = CASES["level 1"].engine(folder)
    engine.save(folder / "one", background=True)
    engine.finish_saving()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.close()
    engine = CASES["level 1"].engine(folder)
    engine.save(folder / "another", background=True)
    with warnings.catch_warnings(record=True) as more:
        warnings.simplefilter("always")
        engine.close()
        engine.close()
    return [str(one.message) for one in caught] + ["then"] + [str(one.message) for one in more]


def test_closing_an_engine_before_its_save_is_whole_warns(tmp_path: Path) -> None:
    for first, *more in run_ranks(2, closes, tmp_path):
        assert first == "then", "a save that was waited for is whole"
        assert len(more) == 1 and "finish_saving() before engine.close()" in more[0]
