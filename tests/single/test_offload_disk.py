"""Optimizer state in files: the same bits as in memory, room that is really there, and nobody else's files touched."""

import copy
import ctypes
import errno
import gc
import mmap
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zero3d.errors import OutOfSpaceError, UsageError, Zero3dError
from zero3d.offload import disk
from zero3d.offload.disk import StateFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, mounts a tmpfs")

MB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StateFiles]:
    one = StateFiles(tmp_path / "state", 3, 1000)
    yield one
    one.close()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_bits_come_back(files: StateFiles, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {
        numel: torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), generator=generator)
        .to(torch.uint8)
        .view(dtype)
        for numel in (1, 511, 4097, 0)
    }
    kept = {numel: files.adopt(f"of {numel}", value) for numel, value in values.items()}
    fresh = {numel: files.tensor(f"more of {numel}", numel, dtype) for numel in values}
    for numel, value in values.items():
        assert fresh[numel].shape == (numel,) and fresh[numel].dtype == dtype and not fresh[numel].any()
        fresh[numel].copy_(value)
    for _ in range(2):
        files.behind([*kept.values(), *fresh.values()])
        files.ahead([*kept.values(), *fresh.values()])
        for numel, value in values.items():
            assert torch.equal(kept[numel].view(torch.uint8), value.view(torch.uint8))
            assert torch.equal(fresh[numel].view(torch.uint8), value.view(torch.uint8))
    assert files.nbytes == 2 * (1 + 511 + 4097) * dtype.itemsize


def test_shapes_are_kept_and_each_begins_on_a_page(files: StateFiles) -> None:
    values = [torch.tensor(7.0), torch.randn(5, 3, 2).transpose(0, 2), torch.randn(3, 0, 2), torch.randn(4)[1:3]]
    values.append(torch.nn.Parameter(torch.randn(6)))
    for value in values:
        kept = files.adopt("one", value)
        assert kept.shape == value.shape and torch.equal(kept, value) and not kept.requires_grad
        assert kept.is_contiguous() and (kept.data_ptr() % mmap.PAGESIZE == 0 or not kept.numel())


def test_thousands_take_few_files_and_descriptors(tmp_path: Path) -> None:
    numel, number = 700, 3000
    before = len(os.listdir("/proc/self/fd"))
    files = StateFiles(tmp_path, 0, numel * number * 4)
    kept = [files.adopt(str(index), torch.full((numel,), float(index))) for index in range(number)]
    files.behind(kept)
    assert len(os.listdir("/proc/self/fd")) - before <= 8
    assert len(list(files.path.iterdir())) <= 4
    assert all(bool((one == index).all()) for index, one in enumerate(kept))
    taken = sum(path.stat().st_blocks * 512 for path in files.path.iterdir())
    # All of it is there before anything was written, and no more than a page a tensor beyond.
    assert numel * number * 4 <= taken <= number * (numel * 4 + mmap.PAGESIZE) + MB
    files.close()


def test_a_tensor_larger_than_a_file_and_files_beyond_what_was_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FILE", 64 * 1024)
    monkeypatch.setattr(disk, "LEAST", 16 * 1024)
    files = StateFiles(tmp_path, 0, 100_000)
    kept = [files.adopt("one", torch.arange(numel)) for numel in (5000, 30_000, 11, 2000, 2000, 9000)]
    files.behind(kept)
    assert all(torch.equal(one, torch.arange(one.numel())) for one in kept)
    assert len(list(files.path.glob("state-*"))) > 3
    files.close()


def resident() -> int:
    """Bytes of this process in memory, files and shared memory included, counted page by page."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def cached(tensor: Tensor) -> float:
    """How much of it the kernel has in memory, as a fraction."""
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), states)
    return sum(one & 1 for one in states) / pages


def test_what_is_let_go_leaves_the_process_memory(files: StateFiles) -> None:
    numel = 8 * MB
    kept, other = files.tensor("large", numel, torch.float32), files.adopt("small", torch.ones(3))
    torch.arange(numel, out=kept)
    full = resident()
    files.behind([kept[: numel // 2]])
    half = resident()
    files.behind([kept])
    none = resident()
    assert 12 * MB < full - half < 20 * MB
    assert full - none > 28 * MB
    assert torch.equal(kept[::4096], torch.arange(0, numel, 4096, dtype=torch.float32))
    assert torch.equal(kept.view(-1, 1024)[-1], torch.arange(numel - 1024, numel, dtype=torch.float32))
    assert other.tolist() == [1, 1, 1]


def test_what_is_wanted_soon_is_read_whole(tmp_path: Path) -> None:
    """One request reads no more than one transfer of the disk holds: a long one was cut without a word."""
    files = StateFiles(tmp_path, 0, 48 * MB)
    kept = files.tensor("large", 12 * MB, torch.float32).fill_(3)
    files.behind([kept])
    path = files.path / "state-00000"
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    in_memory = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout.strip()
    assert cached(kept) < 0.1 or in_memory == "tmpfs"
    files.ahead([kept])
    until = time.monotonic() + 60
    while cached(kept) < 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert cached(kept) == 1
    assert float(kept[::1000].min()) == 3
    files.close()


def test_tensors_that_live_elsewhere_are_left_alone(files: StateFiles) -> None:
    kept = files.adopt("one", torch.ones(5000))
    elsewhere = [torch.ones(5000), torch.tensor(1.0), torch.empty(0), torch.empty(3, device="meta")]
    files.behind([kept, *elsewhere])
    files.ahead([*elsewhere, kept, kept[7:9], kept.view(50, 100).t()[3:]])
    assert all(bool(one.all()) for one in (kept, *elsewhere[:2]))


@pytest.mark.parametrize("way", ["foreach", "fused", "amsgrad", "plain"])
def test_adamw_gives_the_same_bits_as_in_memory(files: StateFiles, way: str) -> None:
    generator = torch.Generator().manual_seed(0)
    in_memory = [torch.randn(numel, generator=generator) for numel in (1, 511, 4097, 30_000)]
    on_disk = [files.adopt(f"master {one.numel()}", one) for one in in_memory]
    options = {} if way == "plain" else {way: True}
    optimizers = [torch.optim.AdamW(one, lr=0.01, weight_decay=0.1, **options) for one in (in_memory, on_disk)]  # type: ignore[arg-type]
    for step in range(5):
        gradients = [torch.randn(one.shape, generator=generator) for one in in_memory]
        files.ahead(held(optimizers[1], on_disk))
        for optimizer, tensors in zip(optimizers, (in_memory, on_disk)):
            for tensor, gradient in zip(tensors, gradients):
                tensor.grad = gradient.clone()
            optimizer.step()
        for tensor in on_disk:
            state = optimizers[1].state[tensor]
            if step == 0:
                state.update({key: files.adopt(key, value) for key, value in state.items() if value.dim()})
        files.behind(held(optimizers[1], on_disk))
    for one, other in zip(in_memory, on_disk):
        assert torch.equal(one, other)
        for key, value in optimizers[0].state[one].items():
            assert torch.equal(value, optimizers[1].state[other][key]), key
    assert files.nbytes == sum(one.nbytes for one in in_memory) * (4 if way == "amsgrad" else 3)


def held(optimizer: torch.optim.Optimizer, masters: list[Tensor]) -> list[Tensor]:
    return [*masters, *(value for state in optimizer.state.values() for value in state.values())]


def test_too_little_free_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OutOfSpaceError) as caught:
        StateFiles(tmp_path, 0, 1 << 60)
    text = str(caught.value)
    assert str(tmp_path / "rank-00000") in text and f"{1 << 60:,} bytes" in text and "offload.folder" in text
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    StateFiles(tmp_path, 0, 1).close()


def fill(folder: Path) -> None:
    """Takes 8 MB in pieces where there is less. All that was made before stays right, and others' files."""
    (folder / "mine.txt").write_text("mine")
    files = StateFiles(folder, 0, 1000)
    kept: list[Tensor] = []
    with pytest.raises(OutOfSpaceError, match="moment of layer") as caught:
        for index in range(32):
            kept.append(files.adopt(f"moment of layer {index}", torch.full((MB // 16,), float(index))))
    assert str(files.path) in str(caught.value) and caught.value.hint
    files.behind(kept)
    assert all(bool((one == index).all()) for index, one in enumerate(kept))
    files.close()
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert (folder / "mine.txt").read_text() == "mine"


def on_a_small_disk(folder: Path) -> None:
    """Run where this process may mount: a tmpfs of 4 MB, then the same one read-only."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
    fill(folder)
    with pytest.raises(OutOfSpaceError, match="5,000,000 bytes on disk"):
        StateFiles(folder, 0, 5_000_000)
    gc.collect()  # the error's frames hold tensors, and a disk that is mapped cannot be made read-only
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    with pytest.raises(UsageError, match="Read-only file system"):
        StateFiles(folder, 0, 1)
    print("all as it should be")


def test_a_full_disk_is_an_error_when_a_tensor_is_made(tmp_path: Path) -> None:
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    code = "import sys; from tests.single.test_offload_disk import *; on_a_small_disk(Path(sys.argv[1]))"
    try:
        able = subprocess.run([*apart, "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("this process may not mount a small disk; the next test fills one by a limit of the process")
    ran = subprocess.run(
        [*apart, sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.strip() == "all as it should be", ran.stderr


def test_a_limit_of_the_process_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LEAST", 1)  # a file for each tensor, to run out of descriptors
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 20, limits[1]))
    try:
        fill(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_limit_on_file_sizes_is_an_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = StateFiles(tmp_path, 0, 1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MB, limits[1]))
    try:
        with pytest.raises(OutOfSpaceError, match=r"momentum .*File too large"):
            files.tensor("momentum", MB, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in files.path.iterdir()] == ["lock"]
    assert files.tensor("momentum", MB, torch.float32).sum() == 0
    files.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, OutOfSpaceError),
        (errno.EDQUOT, OutOfSpaceError),
        (errno.EROFS, UsageError),
        (errno.EIO, Zero3dError),
    ],
)
def test_errors_of_the_system_name_the_path(
    files: StateFiles, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Zero3dError]
) -> None:
    kept = files.adopt("first", torch.ones(10))

    def refuse(*_: int) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(disk, "_sync_file_range", lambda: refuse)
    with pytest.raises(Zero3dError) as late:
        files.behind([kept])

    def fail(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(Zero3dError, match="second") as early:
        files.tensor("second", 10, torch.float32)
    for caught in (late, early):
        assert type(caught.value) is kind and caught.value.where == str(files.path) and caught.value.hint
        assert os.strerror(number) in caught.value.message


def test_without_fallocate_the_room_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", lacks)
    monkeypatch.setattr(disk, "_sync_file_range", lambda: None)
    files = StateFiles(tmp_path, 0, 100)
    fresh, kept = files.tensor("zeros", 700_001, torch.float32), files.adopt("ones", torch.ones(4097))
    taken = sum(path.stat().st_blocks * 512 for path in files.path.iterdir())
    assert taken >= files.nbytes
    files.behind([fresh, kept])
    assert not fresh.any() and bool(kept.all())
    files.close()


@pytest.mark.parametrize("where", ["a file", "below a file", "a link", "a file for the rank", "not ours"])
def test_what_cannot_be_the_folder_is_refused(tmp_path: Path, where: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "state-00000").write_text("precious")
    plain = tmp_path / "plain"
    plain.write_text("text")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "rank-00000").symlink_to(elsewhere)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "rank-00000").write_text("text")
    folder = {
        "a file": plain,
        "below a file": plain / "deeper",
        "a link": tmp_path / "linked",
        "a file for the rank": tmp_path / "taken",
        "not ours": Path("/sys/zero3d-state"),
    }[where]
    with pytest.raises(UsageError) as caught:
        StateFiles(folder, 0, 1)
    assert str(folder) in str(caught.value) and "Set offload.folder" in caught.value.hint
    assert plain.read_text() == "text" and (tmp_path / "taken" / "rank-00000").read_text() == "text"
    assert (elsewhere / "state-00000").read_text() == "precious"


def test_only_what_a_run_left_is_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    outside, mine = tmp_path / "outside", tmp_path / "state" / "rank-00000"
    mine.mkdir(parents=True)
    (outside / "deeper").mkdir(parents=True)
    for path in (outside / "state-00000", outside / "deeper" / "x", mine / "notes.txt", mine / "state-00007"):
        path.write_text("text")
    (mine / "state-00000").symlink_to(outside / "state-00000")
    (mine / "state-00001").symlink_to(outside)
    (mine / "link").symlink_to(outside)
    (tmp_path / "state" / "rank-00001").mkdir()
    (tmp_path / "state" / "rank-00001" / "state-00000").write_text("another rank's")
    files = StateFiles(tmp_path / "state", 0, 1)
    kept = files.adopt("one", torch.ones(3))
    assert {path.name for path in mine.iterdir()} == {"lock", "state-00000", "notes.txt", "link"}
    assert not (mine / "state-00000").is_symlink()
    files.close()
    files.close()
    assert {path.name for path in mine.iterdir()} == {"notes.txt", "link"}
    assert (outside / "state-00000").read_text() == (outside / "deeper" / "x").read_text() == "text"
    assert (tmp_path / "state" / "rank-00001" / "state-00000").read_text() == "another rank's"
    assert kept.tolist() == [1, 1, 1], "still in use when it was closed"


def test_a_second_user_is_refused_until_the_first_is_closed_or_dropped(tmp_path: Path) -> None:
    first = StateFiles(tmp_path, 0, 1)
    kept = first.adopt("one", torch.ones(3))
    other_rank = StateFiles(tmp_path, 1, 1)
    with pytest.raises(UsageError, match=rf"in use .*process {os.getpid()}") as caught:
        StateFiles(tmp_path, 0, 1)
    assert str(tmp_path) in str(caught.value) and "offload.folder" in caught.value.hint
    assert (first.path / "state-00000").exists()
    first.close()
    second = StateFiles(tmp_path, 0, 1)
    path = second.path
    second.tensor("one", 5000, torch.float32)
    del second
    gc.collect()
    assert not path.exists() and kept.tolist() == [1, 1, 1]
    other_rank.close()
    assert tmp_path.exists() and not list(tmp_path.iterdir())


def live(folder: Path, told: Connection) -> None:
    files = StateFiles(folder, 0, 1)
    kept = files.adopt("one", torch.ones(5000))
    told.send(float(kept.sum()))
    told.recv()


def test_a_killed_run_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=live, args=(tmp_path, there), daemon=True)
    child.start()
    assert here.poll(60) and here.recv() == 5000
    with pytest.raises(UsageError, match=f"process {child.pid}"):
        StateFiles(tmp_path, 0, 1)
    child.kill()
    child.join(60)
    left = tmp_path / "rank-00000" / "state-00000"
    assert left.exists()
    files = StateFiles(tmp_path, 0, 1)
    assert not left.exists()
    assert not files.tensor("one", 5000, torch.float32).any(), "zeros, not what was left"
    files.close()


def test_a_process_forked_off_leaves_the_files_alone(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, 0, 1)
    kept = files.adopt("one", torch.ones(3))
    child = multiprocessing.get_context("fork").Process(target=files.close, daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0 and (files.path / "state-00000").exists()
    with pytest.raises(UsageError, match="in use"):
        StateFiles(tmp_path, 0, 1)
    files.behind([kept])
    assert copy.deepcopy(kept).tolist() == [1, 1, 1]
    files.close()


def test_a_run_that_ends_by_an_error_removes_its_files(tmp_path: Path) -> None:
    code = "import sys, torch; from pathlib import Path; from zero3d.offload.disk import StateFiles\n"
    code += "kept = (files := StateFiles(Path(sys.argv[1]), 0, 1)).adopt('one', torch.ones(3)); assert 0, 'wrong'"
    ran = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1 and "AssertionError: wrong" in ran.stderr
    assert not list(tmp_path.iterdir())
