"""Text to token ids and back: plain bytes, or a Hugging Face `tokenizers` JSON file."""

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zero3d.errors import DataError

TokenIds = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids [n], in any unsigned dtype."""

BYTES = "bytes"
_WHERE = "data.tokenizer"
_PIECE_BYTES = 1 << 16


class Tokenizer(Protocol):
    """Ids run from 0 to `vocabulary` - 1. Tokenizers of the same `name` give the same ids."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    def encode(self, text: bytes) -> TokenIds:
        """UTF-8 text -> ids [n]."""
        ...

    def decode(self, ids: npt.ArrayLike) -> str:
        """Ids [n] -> text; what is not UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Each byte is a token."""

    name = BYTES
    vocabulary = 256

    def encode(self, text: bytes) -> npt.NDArray[np.uint8]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: npt.ArrayLike) -> str:
        return np.asarray(ids).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face `tokenizers` JSON file.

    No special token is added, and what the file says about truncation and padding is set aside: a text of any
    length is encoded whole. Text is encoded in pieces of 64 KiB, cut after a line, on all cores.

    DataError: the file is missing or no tokenizer; the package `tokenizers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror or error}",
                where=_WHERE,
                hint=f'Give "{BYTES}", or the path of a Hugging Face tokenizer.json.',
            ) from error
        try:
            package = importlib.import_module("tokenizers")
        except ImportError as error:
            raise DataError(
                f"{path} needs the package tokenizers, which is not installed",
                where=_WHERE,
                hint=f'Run: pip install "tokenizers>=0.19"   or set data.tokenizer = "{BYTES}".',
            ) from error
        try:
            inner: Any = package.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the package raises plain Exception for a file it cannot parse
            raise DataError(
                f"{path} is not a Hugging Face tokenizer: {error}",
                where=_WHERE,
                hint="Give the tokenizer.json that `tokenizer.save(path)` of the package tokenizers writes.",
            ) from error
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        # Ids may have gaps, so their number is not the size that an embedding needs.
        self.vocabulary: int = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if not self.vocabulary:
            raise DataError(f"{path} has an empty vocabulary", where=_WHERE, hint="Train the tokenizer first.")
        self.name = f"{path.name}@{hashlib.sha256(content).hexdigest()[:12]}"

    def encode(self, text: bytes) -> npt.NDArray[np.uint32]:
        texts = [piece.decode("utf-8") for piece in pieces(text, _PIECE_BYTES)]
        encodings = self._inner.encode_batch(texts, add_special_tokens=False)
        ids = [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]
        return np.concatenate(ids) if ids else np.empty(0, dtype=np.uint32)

    def decode(self, ids: npt.ArrayLike) -> str:
        text: str = self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
        return text


def tokenizer_for(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: "bytes" or the path of a JSON file."""
    return ByteTokenizer() if name == BYTES else JsonTokenizer(Path(name).expanduser())


def pieces(text: bytes, at_most: int) -> Iterator[bytes]:
    """Cuts UTF-8 text [n bytes] into pieces of `at_most` (4 or more) bytes, after a line where there is one.

    A line longer than a piece is cut between two characters.
    """
    start = 0
    while start < len(text):
        end = min(start + at_most, len(text))
        if end < len(text):
            line_end = text.rfind(b"\n", start, end) + 1
            end = line_end if line_end > start else character_start(text, end)
        yield text[start:end]
        start = end


def character_start(text: bytes, position: int) -> int:
    """The last place at or before `position` where a UTF-8 character begins."""
    while 0 < position < len(text) and text[position] & 0xC0 == 0x80:
        position -= 1
    return position
