"""One rank's file: a safetensors file, written tensor after tensor, its checksums as it goes.

    8 bytes         how long the header is
    header          JSON: dtype, shape and place of every tensor
    data            the tensors, then the table of checksums (`chunks`)

Where everything will lie is known before anything is written, so nothing is held but the block that is on its way.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zero3d.checkpoint.chunks import TABLE, Checksums, table_bytes
from zero3d.checkpoint.manifest import ITEMSIZE, File
from zero3d.checkpoint.place import Place
from zero3d.checkpoint.storage import storage_of
from zero3d.errors import DISK_FULL, OutOfSpaceError

BLOCK: Final = 1 << 22
"""Bytes that are fetched from a device, and written, at a time."""
PLACE: Final = 8
"""The header's length is a multiple of it, so that elements of every dtype lie where they can be mapped."""

NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names of dtypes."""


@dataclass(frozen=True, kw_only=True)
class Out:
    """A tensor to be written as `key`: `tensor` is flat, `shape` is what it is called."""

    key: str
    shape: Sequence[int]
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where everything will lie. offsets: first byte of each of `outs`, in their order."""

    outs: Sequence[Out]
    offsets: Sequence[int]
    header: bytes
    table: int

    @property
    def size(self) -> int:
        return self.table + table_bytes(self.table)


def plan(outs: Sequence[Out]) -> Plan:
    """Lays out one file. Wide elements come first, as readers map each at a multiple of its width; else the order
    stays."""
    order = sorted(range(len(outs)), key=lambda index: -ITEMSIZE[NAMES[outs[index].tensor.dtype]])
    described: dict[str, object] = {}
    starts, at = [0] * len(outs), 0
    for index in order:
        out = outs[index]
        starts[index] = at
        described[out.key] = {
            "dtype": NAMES[out.tensor.dtype],
            "shape": list(out.shape),
            "data_offsets": [at, at + out.tensor.nbytes],
        }
        at += out.tensor.nbytes
    assert len(described) == len(outs), "two tensors of one name"
    # The header says how long the table is, which depends on the header's own length.
    numel = 0
    while True:
        end = {"dtype": "U8", "shape": [numel], "data_offsets": [at, at + numel]}
        text = json.dumps({**described, TABLE: end}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % PLACE)
        table = 8 + len(text) + at
        if table_bytes(table) == numel:
            break
        numel = table_bytes(table)
    header = len(text).to_bytes(8, "little") + text
    return Plan(
        outs=[outs[index] for index in order],
        offsets=[len(header) + starts[index] for index in order],
        header=header,
        table=table,
    )


Source = Callable[[Out], AbstractContextManager[Tensor]]
"""Gives the elements of a tensor that is about to be written, flat, which stay as they are within."""


@contextmanager
def as_it_is(out: Out) -> Iterator[Tensor]:
    yield out.tensor


def write(planned: Plan, path: Place, source: Source = as_it_is) -> File:
    """Writes the file, which must not exist, and waits until it is there to stay.

    OutOfSpaceError: there is no room for it. OSError: it could not be written for another reason.
    """
    checksums = Checksums()
    try:
        with storage_of(path.parent).create(path.name) as file:
            for block in _blocks(planned, source):
                checksums.add(block)
                file.write(block)
            table = checksums.table()
            file.write(table)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise OutOfSpaceError(
                f"{os.strerror(error.errno)}: {planned.size / 1e6:.1f} MB were to be written",
                where=str(path),
                hint="Free some space there, or save elsewhere.",
            ) from error
        error.filename = str(path)  # An error of writing does not tell it.
        raise
    return File(name=path.name, size=planned.size, table=planned.table, checksum=zlib.crc32(table))


def _blocks(planned: Plan, source: Source) -> Iterator[memoryview]:
    yield memoryview(planned.header)
    for out in planned.outs:
        with source(out) as tensor:
            flat = tensor.detach().view(-1).view(torch.uint8)
            for start in range(0, flat.numel(), BLOCK):
                yield flat[start : start + BLOCK].cpu().numpy().data
