"""Makes the two token files, train and heldout, that a configuration asks for; or finds them made.

Their names carry a fingerprint of what they are made from: the list of files with sizes and times, the
tokenizer and the sequence length. As the contents follow from the fingerprint, callers that make the same
file at the same time replace it by its like, and a file that was damaged is made again.

What is held out: every 20th document, the first one among them; of fewer documents than that, or of a token file
given as the source, the last 5 %, and one sequence at least.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from zero3d.config import Data
from zero3d.data.sources import STDLIB, Listing, list_files, read
from zero3d.data.tokenizers import BYTES, TokenIds, Tokenizer, character_start, pieces, tokenizer_for
from zero3d.data.tokens import FORMAT, TokenFile, TokenWriter, is_token_file
from zero3d.errors import DataError

Progress = Callable[[str, float], None]
"""(what is done, part done from 0 to 1); not called for work of less than two seconds."""

HELDOUT_EVERY = 20
QUIET_SECONDS = 2.0
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """Token ids to train on and to evaluate on, mapped from files."""

    train: TokenIds
    heldout: TokenIds
    tokenizer: str
    vocabulary: int
    train_bytes: int | None
    """UTF-8 bytes of text behind `train`; None where a token file was cut and does not say."""
    heldout_bytes: int | None
    documents: int
    skipped: int
    """Files of the source that are not text and were left out."""
    reused: bool
    """Nothing was tokenized: the files were there."""
    name: str = ""
    """What the files are called by; empty where a token file was given."""


def prepare(data: Data, folder: Path, progress: Progress | None = None, *, name: str = "") -> Prepared:
    """The token files of `data`, kept in `folder`; with `name`, those that an earlier call made, whatever has become
    of their source since.

    Any number of processes may call this at once; to have the work done once, let one call before the others.
    DataError: what `list_files`, `read` and `tokenizer_for` refuse; fewer than sequence_length + 1 tokens to
    train on or held out; a token file that another tokenizer made. OutOfSpaceError: no room for the files.
    """
    tokenizer = tokenizer_for(data.tokenizer)
    given = Path(data.source).expanduser()
    if data.source != STDLIB and is_token_file(given):
        return _cut(TokenFile.open(given), data, tokenizer)
    listing = None if name else list_files(data.source)
    if listing is not None:
        name = fingerprint(listing, tokenizer.name, data.sequence_length)
    paths = (folder / f"train-{name}.bin", folder / f"heldout-{name}.bin")
    files = _whole(*paths)
    reused = files is not None
    if files is None and listing is None:
        raise DataError(f"the token files {name} in {folder} are gone", hint="Start the run again.")
    if files is None:
        assert listing is not None
        _write(paths, listing, tokenizer, data.sequence_length, _Reporter(progress, listing))
        files = tuple(TokenFile.open(path) for path in paths)
    train, heldout = files
    return Prepared(
        train=train.ids,
        heldout=heldout.ids,
        tokenizer=tokenizer.name,
        vocabulary=tokenizer.vocabulary,
        train_bytes=train.header.text_bytes,
        heldout_bytes=heldout.header.text_bytes,
        documents=train.header.documents + heldout.header.documents,
        skipped=train.header.skipped,
        reused=reused,
        name=name,
    )


def fingerprint(listing: Listing, tokenizer: str, sequence_length: int) -> str:
    """16 hexadecimal digits that change with any file's name, size or time, the tokenizer or the length."""
    files = [(file.name, file.size, file.modified) for file in listing.files]
    facts = [FORMAT, str(listing.root.resolve()), files, tokenizer, sequence_length]
    return hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()[:16]


def _whole(*paths: Path) -> tuple[TokenFile, ...] | None:
    """The token files, if all are there with the contents that were written."""
    try:
        files = tuple(TokenFile.open(path) for path in paths)
        for file in files:
            file.check()
    except (DataError, OSError):
        return None
    return files


def _write(
    paths: tuple[Path, Path],
    listing: Listing,
    tokenizer: Tokenizer,
    sequence_length: int,
    report: "_Reporter",
) -> None:
    skipped: list[str] = []
    documents = read(listing, skipped.append)
    with ExitStack() as stack:
        train, heldout = (
            stack.enter_context(
                TokenWriter(path, vocabulary=tokenizer.vocabulary, tokenizer=tokenizer.name, source=listing.source)
            )
            for path in paths
        )
        # Of a few documents one could be most of the text, so they are cut by position instead.
        first = list(islice(documents, HELDOUT_EVERY))
        if len(first) < HELDOUT_EVERY:
            text = b"".join(document.content for document in first)
            head, tail = _split_document(text, tokenizer, sequence_length)
            train.documents = len(first)
            for writer, text in ((train, head), (heldout, tail)):
                _add(writer, text, tokenizer, report)
        else:
            for number, document in enumerate(chain(first, documents)):
                writer = train if number % HELDOUT_EVERY else heldout
                writer.documents += 1
                _add(writer, document.content, tokenizer, report)
        train.skipped = heldout.skipped = len(skipped)
        _require(train.num_tokens, heldout.num_tokens, sequence_length, listing.source)
    report.done()


def _add(writer: TokenWriter, text: bytes, tokenizer: Tokenizer, report: "_Reporter") -> None:
    for piece in pieces(text, _PIECE_BYTES):
        writer.add(tokenizer.encode(piece), len(piece))
        report.advance(len(piece))


def _split_document(text: bytes, tokenizer: Tokenizer, sequence_length: int) -> tuple[bytes, bytes]:
    """All but the end, and the end: 5 % of the bytes, or as many as make one sequence and its last target."""
    tail = heldout_part(len(text), sequence_length)
    while True:
        cut = character_start(text, max(len(text) - tail, 0))
        # The cut is between bytes, not tokens, so that each part's text is known whatever the tokenizer.
        if not cut or len(tokenizer.encode(text[cut:])) > sequence_length:
            return text[:cut], text[cut:]
        tail *= 2


def heldout_part(whole: int, sequence_length: int) -> int:
    """How much of `whole`, in bytes or tokens, is held out when it is cut by position."""
    return max(whole // HELDOUT_EVERY, sequence_length + 1)


def _cut(file: TokenFile, data: Data, tokenizer: Tokenizer) -> Prepared:
    header = file.header
    if header.tokenizer != tokenizer.name:
        raise DataError(
            f"{data.source} was made by tokenizer {header.tokenizer}, and data.tokenizer is {tokenizer.name}",
            where="data.tokenizer",
            hint="Set data.tokenizer to the one that made the token file, or make it again from its text.",
        )
    cut = max(header.tokens - heldout_part(header.tokens, data.sequence_length), 0)
    _require(cut, header.tokens - cut, data.sequence_length, data.source)
    by_bytes = header.tokenizer == BYTES
    return Prepared(
        train=file.ids[:cut],
        heldout=file.ids[cut:],
        tokenizer=header.tokenizer,
        vocabulary=header.vocabulary,
        train_bytes=cut if by_bytes else None,
        heldout_bytes=header.tokens - cut if by_bytes else None,
        documents=header.documents,
        skipped=header.skipped,
        reused=True,
    )


def _require(train: int, heldout: int, sequence_length: int, source: str) -> None:
    need = sequence_length + 1
    if min(train, heldout) >= need:
        return
    raise DataError(
        f"{source} has {train + heldout} tokens: {train} to train on and {heldout} held out, "
        f"where a sequence of {sequence_length} needs {need} in each",
        where="data.source",
        hint="Give more text, or a smaller data.sequence_length.",
    )


class _Reporter:
    """Passes progress on: nothing in the first two seconds, then twice a second at most."""

    def __init__(self, tell: Progress | None, listing: Listing) -> None:
        self._tell = tell
        self._text = f"tokenizing {listing.source}"
        self._total = max(listing.size, 1)
        self._bytes = 0
        self._next = time.monotonic() + QUIET_SECONDS
        self._told = False

    def advance(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        if self._tell is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.5
            self._told = True
            self._tell(self._text, min(self._bytes / self._total, 1.0))

    def done(self) -> None:
        if self._tell is not None and self._told:
            self._tell(self._text, 1.0)
