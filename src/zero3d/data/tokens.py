"""Token files: `NAME.bin` is token ids and nothing else; `NAME.bin.json` says how to read them.

The ids are little-endian unsigned integers of the smallest of 1, 2 or 4 bytes that holds the vocabulary, and
are mapped, never loaded. Both files are written under temporary names and renamed when they are whole, the
sidecar last: who can open a token file sees all of it.
"""

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zero3d.data.tokenizers import TokenIds
from zero3d.errors import DISK_FULL, DataError, OutOfSpaceError

FORMAT: Final = 1
_HASH_TOKENS = 1 << 20
_REMAKE = "Make the token file again, or remove both files."

DtypeName = Literal["uint8", "uint16", "uint32"]


class Header(BaseModel):
    """The sidecar."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = FORMAT
    dtype: DtypeName
    vocabulary: int = Field(ge=1, le=1 << 32)
    tokens: int = Field(ge=0)
    text_bytes: int = Field(ge=0)
    """UTF-8 bytes of the text that the tokens came from."""
    tokenizer: str
    source: str
    documents: int = Field(ge=0)
    skipped: int = Field(ge=0)
    """Files of the source that were left out since they are not text."""
    sha256: str
    """Of the .bin file."""


def dtype_for(vocabulary: int) -> DtypeName:
    """The smallest dtype that holds ids below `vocabulary`."""
    if vocabulary <= 1 << 8:
        return "uint8"
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def sidecar_of(path: Path) -> Path:
    return Path(f"{path}.json")


def is_token_file(path: Path) -> bool:
    """Whether `path` is a .bin with a sidecar; `TokenFile.open` may still refuse it."""
    return path.suffix == ".bin" and sidecar_of(path).is_file()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """A mapped token file: ids [n], read-only."""

    path: Path
    header: Header
    ids: TokenIds

    @classmethod
    def open(cls, path: Path) -> Self:
        """Maps the ids; checks the sidecar against the size of the file, not the contents (see `check`).

        DataError: a file is missing, the sidecar is malformed or of another version, or the sizes disagree.
        """
        header = _read_header(path)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", where=str(path), hint=_REMAKE) from error
        dtype = np.dtype(header.dtype).newbyteorder("<")
        if size != header.tokens * dtype.itemsize:
            raise DataError(
                f"{size} bytes, where {header.tokens} tokens of {dtype.itemsize} bytes make "
                f"{header.tokens * dtype.itemsize}: the file was cut off or changed",
                where=str(path),
                hint=_REMAKE,
            )
        if not header.tokens:
            return cls(path=path, header=header, ids=np.empty(0, dtype=dtype))
        return cls(path=path, header=header, ids=np.memmap(path, dtype=dtype, mode="r"))

    def check(self) -> None:
        """Reads the whole file. DataError: the contents are not what was written."""
        digest = hashlib.sha256()
        # What is mapped, not what the path leads to by now.
        for start in range(0, len(self.ids), _HASH_TOKENS):
            digest.update(self.ids[start : start + _HASH_TOKENS].data)
        if digest.hexdigest() != self.header.sha256:
            raise DataError("contents differ from their checksum", where=str(self.path), hint=_REMAKE)


class TokenWriter:
    """Writes a token file, as a context; left by an exception, `path` stays as it was."""

    def __init__(self, path: Path, *, vocabulary: int, tokenizer: str, source: str) -> None:
        self.path = path
        self.num_tokens = 0
        self.text_bytes = 0
        self.documents = 0
        self.skipped = 0
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._source = source
        self._dtype = dtype_for(vocabulary)
        self._digest = hashlib.sha256()
        # A name of its own for each writer: callers that make the same file at once do not meet.
        self._part = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")

    def __enter__(self) -> Self:
        with _as_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._part, "xb")
        return self

    def add(self, ids: TokenIds, text_bytes: int) -> None:
        """Appends ids [n] that came from `text_bytes` bytes of text."""
        if len(ids) and int(ids.max()) >= self._vocabulary:
            raise DataError(
                f"token {int(ids.max())} in a vocabulary of {self._vocabulary}",
                where=self._tokenizer,
                hint="The tokenizer gives ids that it says it has not; use another one.",
            )
        data = ids.astype(np.dtype(self._dtype).newbyteorder("<"), copy=False).tobytes()
        self._digest.update(data)
        with _as_errors(self.path):
            self._file.write(data)
        self.num_tokens += len(ids)
        self.text_bytes += text_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _as_errors(self.path):
            try:
                self._file.close()
                if kind is None:
                    os.replace(self._part, self.path)
                    self._write_sidecar()
            finally:
                self._part.unlink(missing_ok=True)

    def _write_sidecar(self) -> None:
        header = Header(
            dtype=self._dtype,
            vocabulary=self._vocabulary,
            tokens=self.num_tokens,
            text_bytes=self.text_bytes,
            tokenizer=self._tokenizer,
            source=self._source,
            documents=self.documents,
            skipped=self.skipped,
            sha256=self._digest.hexdigest(),
        )
        self._part.write_text(header.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(self._part, sidecar_of(self.path))


def _read_header(path: Path) -> Header:
    sidecar = sidecar_of(path)
    try:
        text = sidecar.read_bytes()
    except OSError as error:
        raise DataError(
            f"no sidecar {sidecar.name}: {error.strerror or error}",
            where=str(path),
            hint="A token file is a pair, NAME.bin and NAME.bin.json; keep them together.",
        ) from error
    try:
        header = Header.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "JSON"
        raise DataError(
            f"not the sidecar of a token file of version {FORMAT}: {field}: {first['msg']}",
            where=str(sidecar),
            hint=_REMAKE,
        ) from error
    if header.dtype != dtype_for(header.vocabulary):
        raise DataError(
            f"dtype {header.dtype} for a vocabulary of {header.vocabulary}, which takes {dtype_for(header.vocabulary)}",
            where=str(sidecar),
            hint=_REMAKE,
        )
    return header


@contextmanager
def _as_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        if error.errno in DISK_FULL:
            raise OutOfSpaceError(what, where=str(path), hint="Free some space, or choose another folder.") from error
        raise DataError(what, where=str(path), hint="Choose a folder that you may write to.") from error
