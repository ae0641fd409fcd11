"""Files of checkpoints: other programs read them, ranges are read and checked, damage is refused."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.pure.test_checkpoint_manifest import made
from zero3d.checkpoint.chunks import CHUNK, TABLE, Checksums, first_wrong, table_bytes
from zero3d.checkpoint.manifest import File, Manifest
from zero3d.checkpoint.read import Job, carry_out
from zero3d.checkpoint.slices import Copy
from zero3d.checkpoint.write import NAMES, Out, plan, write
from zero3d.errors import DataError

DTYPES = list(NAMES)


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    numel = torch.Size(shape).numel()
    raw = torch.arange(numel * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 100)
    return raw.view(dtype).reshape(shape)


def write_all(folder: Path, tensors: dict[str, Tensor]) -> tuple[Manifest, dict[str, int]]:
    """One file -> a manifest with it, and the first byte of each tensor."""
    planned = plan([Out(key=key, shape=one.shape, tensor=one.reshape(-1)) for key, one in tensors.items()])
    file = write(planned, folder / "rank-00000.safetensors")
    offsets = {out.key: offset for out, offset in zip(planned.outs, planned.offsets)}
    return made().model_copy(update={"files": [file]}), offsets


def read(folder: Path, manifest: Manifest, offset: int, like: Tensor) -> Tensor:
    out = torch.zeros(like.numel(), dtype=like.dtype)
    carry_out([job(offset, out, Copy(1, like.numel(), 0, 0, 0, 0))], folder, manifest)
    return out.view(like.shape)


def job(offset: int, out: Tensor, copy: Copy) -> Job:
    return Job(file=0, offset=offset, dtype=out.dtype, copy=copy, out=out)


def test_every_dtype_and_shape_is_read_by_safetensors_and_by_us(tmp_path: Path) -> None:
    tensors = {f"{dtype} {shape}": values(dtype, *shape) for dtype in DTYPES for shape in ((), (3,), (0, 4), (5, 7))}
    manifest, offsets = write_all(tmp_path, tensors)
    others = load_file(tmp_path / "rank-00000.safetensors")
    assert others.pop(TABLE).numel() == table_bytes(manifest.files[0].table)
    assert others.keys() == tensors.keys()
    for key, one in tensors.items():
        for found in (others[key], *([read(tmp_path, manifest, offsets[key], one)] if one.numel() else [])):
            assert found.dtype == one.dtype and found.shape == one.shape
            assert torch.equal(found.view(-1).view(torch.uint8), one.view(-1).view(torch.uint8)), key


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    write_all(tmp_path, {"a": torch.ones(3)})
    with pytest.raises(FileExistsError):
        write_all(tmp_path, {"a": torch.zeros(3)})


def test_a_range_costs_its_chunks_and_no_more(tmp_path: Path) -> None:
    """A quarter of a matrix' rows, of its columns, and rows apart; each in a file of 4 MB."""
    matrix = torch.arange(1024 * 1024, dtype=torch.float32).view(1024, 1024)
    manifest, offsets = write_all(tmp_path, {"before": torch.ones(5), "matrix": matrix})
    table = table_bytes(manifest.files[0].table)
    quarter = 256 * 1024
    for copy, expected, most in (
        (Copy(1, quarter, quarter, 0, 0, 0), matrix[256:512], quarter * 4 + 2 * CHUNK),
        (Copy(1024, 256, 512, 1024, 0, 256), matrix[:, 512:768], matrix.nbytes + CHUNK),
        (Copy(4, 1024, 0, quarter, 0, 1024), matrix[::256], 4 * (4096 + CHUNK)),
    ):
        out = torch.zeros(expected.numel())
        bytes_read = carry_out([job(offsets["matrix"], out, copy)], tmp_path, manifest)
        assert torch.equal(out.view(expected.shape), expected)
        assert bytes_read <= most + table


def test_neighbours_are_read_once(tmp_path: Path) -> None:
    tensors = {f"t{number}": values(torch.float32, 100 + number) for number in range(200)}
    manifest, offsets = write_all(tmp_path, tensors)
    outs = {key: torch.zeros_like(one) for key, one in tensors.items()}
    jobs = [job(offsets[key], out, Copy(1, out.numel(), 0, 0, 0, 0)) for key, out in outs.items()]
    bytes_read = carry_out(reversed(jobs), tmp_path, manifest)
    assert all(torch.equal(out, tensors[key]) for key, out in outs.items())
    assert bytes_read <= manifest.files[0].size


def test_values_are_cast_to_what_wants_them(tmp_path: Path) -> None:
    manifest, offsets = write_all(tmp_path, {"a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)})
    out = torch.zeros(2)
    one = Job(file=0, offset=offsets["a"], dtype=torch.bfloat16, copy=Copy(1, 2, 0, 0, 0, 0), out=out)
    carry_out([one], tmp_path, manifest)
    assert out.tolist() == [1.5, -2.0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, File, int]:
    folder = tmp_path_factory.mktemp("written")
    manifest, offsets = write_all(folder, {"a": values(torch.float32, 10_000)})
    return folder, manifest.files[0], offsets["a"]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_flipped_bit_and_any_cut_is_refused(written: tuple[Path, File, int], data: st.DataObject) -> None:
    """In what is read: the header is not, and other programs that read it check it themselves."""
    folder, file, offset = written
    path = folder / file.name
    good = path.read_bytes()
    bad = bytearray(good)
    if data.draw(st.booleans()):
        bad[data.draw(st.integers(offset, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        bad = bad[: data.draw(st.integers(0, len(good) - 1))]
    path.write_bytes(bad)
    try:
        with pytest.raises(DataError) as raised:
            read(folder, made().model_copy(update={"files": [file]}), offset, torch.zeros(10_000))
        assert raised.value.where == str(path) and raised.value.hint
    finally:
        path.write_bytes(good)


def test_a_file_that_is_a_link_is_refused(written: tuple[Path, File, int], tmp_path: Path) -> None:
    folder, file, offset = written
    (tmp_path / file.name).symlink_to(folder / file.name)
    with pytest.raises(DataError, match="link"):
        read(tmp_path, made().model_copy(update={"files": [file]}), offset, torch.zeros(10_000))


@given(st.lists(st.integers(0, 3 * CHUNK), max_size=6))
def test_checksums_do_not_depend_on_portions(edges: list[int]) -> None:
    data = memoryview(bytes(range(256)) * (3 * CHUNK // 256 + 1))[: 3 * CHUNK - 5]
    apart, at_once = Checksums(), Checksums()
    at_once.add(data)
    for start, stop in pairwise([0, *sorted(edges), len(data)]):
        apart.add(data[start:stop])
    table = at_once.table()
    assert apart.table() == table and len(table) == table_bytes(len(data))
    numbers = [int.from_bytes(table[at : at + 4], "little") for at in range(0, len(table), 4)]
    assert first_wrong(numbers, 0, data) is None
    assert first_wrong(numbers, 0, memoryview(bytes(len(data)))) == 0
