"""The manifest: all that a checkpoint holds, by name, and where each piece of it lies. Pure.

    entry    one whole tensor: a weight, an optimizer state of a parameter, or a buffer
    part     of a tensor that was cut over tensor-parallel ranks: which ranges of dim `dim` it has, then padding
    piece    elements [begin, begin + numel) of a part, flattened: `key` in a safetensors file, at byte `offset` of it

The pieces of a part cover it, and the parts of an entry cover the tensor, each element once; `parse` refuses what
does not. Files hold checksums of their own (`chunks`), the manifest those of the files' tables and its own.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zero3d.checkpoint.place import Place
from zero3d.checkpoint.slices import Part, Span, cut, whole
from zero3d.errors import DataError
from zero3d.slicing import Range

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
ITEMSIZE: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element, by safetensors' names of dtypes."""
LARGEST: Final = {"F64": 1.7e308, "F32": 3.4e38, "F16": 65504.0, "BF16": 3.3e38, "F8_E4M3": 448.0, "F8_E5M2": 57344.0}
"""Number of each dtype of real numbers."""
MOST_STEPS: Final = 10**18
NOT_FINITE: Final = ("nan", "inf", "-inf")
"""As texts, which JSON has no numbers for."""
FILE_NAME: Final = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
"""Of a file in the checkpoint's folder: no path leads out of it."""
OTHER: Final = "Take another checkpoint, or an undamaged copy of this one."

Count = Annotated[int, Field(ge=0)]
What = Literal["all", "weights", "trainable"]
Kind = Literal["weight", "state", "buffer"]
Scalar = bool | int | float | str | None


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Number(Record):
    """An optimizer state without elements. dtype: of a tensor; None: a plain Python value."""

    dtype: str | None
    value: Scalar


class Piece(Record):
    file: Count
    key: str
    offset: Count
    begin: Count
    numel: Annotated[int, Field(ge=1)]


class Slice(Record):
    ranges: list[tuple[Count, Count]]
    padding: Count
    pieces: list[Piece]


class Entry(Record):
    """`key`: of an optimizer state; `made`: the dtype that the model has a weight in; `dim`: None where the tensor is
    not cut; `trainable`: of a parameter."""

    kind: Kind
    name: str
    key: str = ""
    shape: list[Count]
    dtype: str
    made: str | None = None
    trainable: bool = False
    ties: list[str] = []
    dim: int | None = None
    parts: list[Slice]

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"{self.key} of {self.name}" if self.key else self.name

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def part(self, one: Slice) -> Part:
        if self.dim is None:
            return whole(self.shape)
        return cut(self.shape, self.dim, one.ranges, one.padding)

    def spans(self) -> Iterator[tuple[Piece, Span]]:
        for one in self.parts:
            part = self.part(one)
            yield from ((piece, Span(part, piece.begin, piece.numel)) for piece in one.pieces)


class File(Record):
    """`table`: at which byte the checksums of its chunks begin, which end it; `checksum`: of these, crc32."""

    name: Annotated[str, Field(pattern=FILE_NAME)]
    size: Count
    table: Count
    checksum: Count


class Scaling(Record):
    """The state of the fp16 loss scaler."""

    enabled: bool
    scale: float
    bad_steps: int
    good_steps: int
    started: bool


class Sizes(Record):
    """The layout that wrote it."""

    dp: int
    tp: int
    pp: int


class Manifest(Record):
    """`numbers`: by parameter, its optimizer states without elements; `extra`: what the caller wanted kept."""

    format: Literal[1] = FORMAT
    step: Count
    what: What
    layout: Sizes
    learning_rate: float
    scaler: Scaling
    config: dict[str, Any]
    extra: dict[str, Any]
    numbers: dict[str, dict[str, Number]]
    tensors: list[Entry]
    files: list[File]


def dump(manifest: Manifest) -> str:
    """The text of manifest.json. ValueError: `extra` or `config` holds what JSON cannot."""
    body = manifest.model_dump()
    return json.dumps({"checksum": _checksum(body), **body}, allow_nan=False)


def parse(text: str, where: Place) -> Manifest:
    """Reads what `dump` gave. DataError: another version, changed since, or a piece that cannot be."""
    try:
        tree = json.loads(text)
        version = tree["format"]
        if version != FORMAT:
            raise DataError(
                f"the checkpoint has format {str(version)[:40]}, and this version of zero3d reads format {FORMAT}",
                where=str(where),
                hint="Read it with the version of zero3d that wrote it.",
            )
        checksum = tree.pop("checksum")
        if checksum != _checksum(tree):
            raise DataError("the manifest is not what was written", where=str(where), hint=OTHER)
        manifest = Manifest.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{place}: {first['msg']}", where=str(where), hint=OTHER) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"no manifest of a checkpoint: {error!r:.200}", where=str(where), hint=OTHER) from error
    for problem in problems(manifest):
        raise DataError(problem, where=str(where), hint=OTHER)
    return manifest


def problems(manifest: Manifest) -> Iterator[str]:
    """What cannot be: pieces that overlap, leave something out or lie outside their file, names that come twice."""
    seen = set[tuple[str, str, str]]()
    if manifest.step >= MOST_STEPS:
        yield f"step {manifest.step!s:.40}"
    updates, own = manifest.extra.get("updates", 0), manifest.extra.get("own", {})  # What an engine keeps.
    if not (isinstance(updates, int) and 0 <= updates < MOST_STEPS and isinstance(own, dict)):
        yield "extra is not what an engine keeps"
    for one in manifest.files:
        if not 8 <= one.table <= one.size:
            yield f"{one.name} has its checksums at byte {one.table} of {one.size}"
    if len({one.name for one in manifest.files}) < len(manifest.files):
        yield "a file is listed twice"
    for entry in manifest.tensors:
        if (entry.kind, entry.name, entry.key) in seen:
            yield f"{entry.label} is listed twice"
        seen.add((entry.kind, entry.name, entry.key))
        yield from _of_entry(entry, manifest.files)
    for name, of in manifest.numbers.items():
        yield from (f"{key} of {name} is {one.value!r:.40} of {one.dtype:.40}" for key, one in of.items() if _odd(one))


def _of_entry(entry: Entry, files: list[File]) -> Iterator[str]:
    if entry.dtype not in ITEMSIZE:
        yield f"{entry.label} has dtype {entry.dtype[:40]}"
        return
    if prod(max(extent, 1) for extent in entry.shape) >= 1 << 60:
        yield f"{entry.label} has shape {entry.shape!s:.80}"
        return
    if entry.dim is not None and not 0 <= entry.dim < len(entry.shape):
        yield f"{entry.label} is cut along dim {entry.dim}, and has {len(entry.shape)}"
        return
    if entry.dim is None:
        if len(entry.parts) != (1 if entry.numel else 0):
            yield f"{entry.label} is not cut and has {len(entry.parts)} parts"
    elif not _covers(sorted(one for part in entry.parts for one in part.ranges), entry.shape[entry.dim]):
        yield f"the parts of {entry.label} are not all of it, each element once"
    for part in entry.parts:
        if part.ranges != sorted(part.ranges):
            yield f"the ranges of {entry.label} are out of order"
        pieces = sorted((piece.begin, piece.begin + piece.numel) for piece in part.pieces)
        if not _covers(pieces, entry.part(part).numel):
            yield f"the pieces of {entry.label} are not all of it, each element once"
        for piece in part.pieces:
            if piece.file >= len(files):
                yield f"{entry.label} is in file {piece.file} of {len(files)}"
            elif piece.offset + piece.numel * ITEMSIZE[entry.dtype] > files[piece.file].table:
                yield f"{entry.label} lies outside of {files[piece.file].name}"
            elif piece.offset % ITEMSIZE[entry.dtype]:
                yield f"{entry.label} begins in the middle of an element of {files[piece.file].name}"


def _odd(one: Number) -> bool:
    """Whether no tensor of its dtype has such a value."""
    value, dtype = one.value, one.dtype
    if dtype is None:
        return False
    if dtype in LARGEST:
        return value not in NOT_FINITE if isinstance(value, str | None) else abs(value) > LARGEST[dtype]
    if dtype not in ITEMSIZE or not isinstance(value, int):
        return True
    bits = 1 if dtype == "BOOL" else 8 * ITEMSIZE[dtype] - (dtype[0] == "I")
    return not -(1 << bits if dtype[0] == "I" else 0) <= value < 1 << bits


def _covers(ranges: list[Range], extent: int) -> bool:
    """Whether sorted ranges lie one after the other from 0 to `extent`."""
    at = 0
    for start, stop in ranges:
        if start != at or stop < start:
            return False
        at = stop
    return at == extent


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
