"""What all ranks must have alike before the first step: the data they train on, and the folder of their checkpoints.

On one machine that goes without saying. On many each may have prepared its own data, and a folder may be each
machine's own: batches would be taken from different texts, and no checkpoint would be whole.
"""

import os
import socket
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from typing import Protocol

import numpy as np

from zero3d.data.prepare import Prepared
from zero3d.data.tokenizers import TokenIds
from zero3d.errors import DataError, UsageError

SAMPLES, SAMPLE = 256, 4096
"""Of a token file so many slices of so many tokens are compared, its beginning and its end among them."""
PATIENCE = 5.0
"""Seconds in which a file must have come through to all machines that share its folder."""


class Ranks(Protocol):
    """All ranks of a run, such as an Engine's."""

    @property
    def rank(self) -> int: ...

    def everyones(self, mine: str, what: str) -> list[str]:
        """The texts of all ranks, by rank. Collective."""
        ...


def refuse_other_tokens(ranks: Ranks, prepared: Prepared) -> None:
    """DataError, on all ranks: some have other tokens than rank 0. Collective."""
    mine = " ".join(_digest(tokens) for tokens in (prepared.train, prepared.heldout))
    told = ranks.everyones(f"{mine} on {socket.gethostname()}", "data")
    other = next((rank for rank, text in enumerate(told) if _facts(text) != _facts(told[0])), None)
    if other is None:
        return
    raise DataError(
        f"rank {other} has other tokens than rank 0: {_words(told[other])}, and {_words(told[0])}",
        where="data.source",
        hint="Every machine must have the same text (with python-stdlib: the same Python). Prepare a token file once "
        "and give data.source its path on each, or put data.source and run.out on a file system that all share.",
    )


def refuse_own_folders(ranks: Ranks, folder: Path, key: str) -> None:
    """UsageError, on all ranks: some do not see what rank 0 writes into `folder`, or may not write. Collective.

    key: what to set to another one."""
    mark = folder / f".seen-{token_hex(4)}"
    error = _made(mark) if ranks.rank == 0 else ""
    first = ranks.everyones(f"{error}\n{mark.name}", "a file of rank 0")[0]
    error, _, name = first.partition("\n")
    seen = ranks.everyones("" if error or _comes(folder / name) else socket.gethostname(), "who sees it")
    if ranks.rank == 0:
        mark.unlink(missing_ok=True)
    hint = (
        f"A checkpoint is made by all ranks: put {key} on a file system that all machines have at the same path, or "
        "set checkpoint.folder to a URL, or checkpoint.every = 0 to keep none (and leave --resume out)."
    )
    if error:
        raise UsageError(f"{key} = {str(folder)!r} cannot be written: {error}", where="rank 0", hint=hint)
    blind = [rank for rank, host in enumerate(seen) if host]
    if blind:
        raise UsageError(
            f"{key} = {str(folder)!r} is not one folder for all ranks: {_named(blind)} on {seen[blind[0]]} cannot "
            "write there, or does not see what rank 0 has written",
            hint=hint,
        )


def _digest(tokens: TokenIds) -> str:
    """Their number, and a checksum of slices of them."""
    starts = np.unique(np.linspace(0, max(len(tokens) - SAMPLE, 0), SAMPLES).astype(np.int64))
    checksum = 0
    for start in starts.tolist():
        checksum = zlib.crc32(np.asarray(tokens[start : start + SAMPLE]).astype("<u4").tobytes(), checksum)
    return f"{len(tokens)} {checksum:08x}"


def _facts(text: str) -> str:
    return text.partition(" on ")[0]


def _words(text: str) -> str:
    facts, _, host = text.partition(" on ")
    train, checksum, heldout, _ = facts.split()
    return f"{int(train):,} to train on and {int(heldout):,} held out (checksum {checksum}) on {host}"


def _made(mark: Path) -> str:
    """Makes an empty file. -> why it cannot be made; empty if it was."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _comes(mark: Path) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not mark.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return os.access(mark.parent, os.W_OK | os.X_OK)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, rank {ranks[0]} first,"
