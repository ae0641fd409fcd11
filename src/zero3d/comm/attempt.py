"""Ranks that a launcher starts again meet at the store of those that failed, which has all that they have left there.

    rank r      hello r = a new word                  rank 0 answers each word that it finds, once; those of ranks that
    rank 0      welcome WORD = attempt                are gone have no reader
    rank r      here ATTEMPT r                        rank 0 goes on when all are here

A number of the launcher's would not do: it does not count machines that come and go.
"""

import time
from datetime import timedelta
from secrets import token_hex
from typing import Protocol

from zero3d.errors import RankFailedError

PAUSE = 0.01
"""Seconds between two looks of rank 0."""
MEET = (
    "All must be started with the same MASTER_ADDR and MASTER_PORT (or --rdzv-endpoint) and reach it within "
    "run.timeout_seconds; zero3d doctor shows what this machine can reach."
)


class Store(Protocol):
    """What ranks write for each other; `get` waits for the key, for as long as the store's own time-out."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def agree_on_attempt(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A word that all ranks now alive share, and no earlier ones did. Collective. RankFailedError: some do not come
    within the time-out."""
    if rank != 0:
        mine = token_hex(8)
        store.set(f"hello {rank}", mine)
        try:
            attempt = store.get(f"welcome {mine}").decode()
        except RuntimeError as error:
            raise RankFailedError(
                "rank 0 did not come to where ranks meet", where=str(error)[:200], hint=MEET
            ) from None
        store.set(f"here {attempt} {rank}", "yes")
        return attempt
    attempt, answered = token_hex(8), set[str]()
    deadline = time.monotonic() + timeout.total_seconds()
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if store.check([f"here {attempt} {other}"]):
                missing.discard(other)
            elif store.check([f"hello {other}"]) and (word := store.get(f"hello {other}").decode()) not in answered:
                answered.add(word)
                store.set(f"welcome {word}", attempt)
        if missing and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)[:8]))
            raise RankFailedError(f"ranks {ranks} did not come to where ranks meet within the time-out", hint=MEET)
        time.sleep(PAUSE if missing else 0)
    return attempt
