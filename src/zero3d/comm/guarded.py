"""Calls that end when they must, whatever the store of a process group does.

A store answers over a connection, and most of its calls wait for their answer without end. A connection whose link is
cut is not closed: nobody hears of it for a quarter of an hour. So calls are made on another thread, and who waits for
them stops doing so in time. A native call cannot be ended; its thread is left to it, and ends with the process.
"""

import threading
from collections.abc import Callable
from copy import copy
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from zero3d.errors import RankFailedError

T = TypeVar("T")
Answer = SimpleQueue[tuple[bool, Any]]
"""Whether a call went well, and what it gave or raised."""
Call = tuple[Callable[[], Any], Answer]

SILENT = (
    "The machine of rank 0, where the store is, or the link to it is gone. Start all ranks again with --resume; "
    "zero3d doctor shows what this machine can reach."
)


class Board(Protocol):
    """What ranks write for each other: torch.distributed's store. `get` is called for what is there alone."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...


class UnansweredError(RankFailedError):
    """The store has not answered in time. It may yet."""


class GuardedBoard:
    """A `Board` each of whose calls ends within `seconds`; raises `UnansweredError` where the answer has not come.

    Calls are made in their order, also those that nobody waits for any more; once they are through the board serves
    again, as a link may come back. Used by one thread at a time.
    """

    def __init__(self, board: Board, seconds: float) -> None:
        self._board = board
        self._seconds = seconds
        self._calls: SimpleQueue[Call] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name="zero3d board", daemon=True).start()

    def patient(self, seconds: float) -> "GuardedBoard":
        """The same board, each call of which may take `seconds`."""
        found = copy(self)
        found._seconds = seconds
        return found

    def set(self, key: str, value: str, /) -> None:
        self._ask(lambda: self._board.set(key, value))

    def get(self, key: str, /) -> bytes:
        return self._ask(lambda: self._board.get(key))

    def check(self, keys: list[str], /) -> bool:
        return self._ask(lambda: self._board.check(keys))

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        return self._ask(lambda: self._board.compare_set(key, expected, value))

    def add(self, key: str, amount: int, /) -> int:
        return self._ask(lambda: self._board.add(key, amount))

    def _ask(self, call: Callable[[], T]) -> T:
        answer: Answer = SimpleQueue()
        self._calls.put((call, answer))
        try:
            result: T = _taken(answer, self._seconds)
        except Empty:
            raise UnansweredError(
                f"the store where ranks meet has not answered for {self._seconds:g} s", hint=SILENT
            ) from None
        return result


def in_time(seconds: float, work: Callable[[], T], what: str) -> T:
    """`work()`, done on another thread. RankFailedError: it has not ended after `seconds`. what: it is, for errors."""
    answer: Answer = SimpleQueue()
    threading.Thread(target=_make, args=(work, answer), name=f"zero3d: {what}", daemon=True).start()
    try:
        result: T = _taken(answer, seconds)
    except Empty:
        raise RankFailedError(f"{what} has not come to an end within the time-out", hint=SILENT) from None
    return result


def _taken(answer: Answer, seconds: float) -> Any:
    """What the call gave, or raises what it raised. Empty: it has not ended."""
    good, value = answer.get(timeout=seconds)
    if not good:
        raise value
    return value


def _serve(calls: "SimpleQueue[Call]") -> None:
    while True:
        _make(*calls.get())


def _make(call: Callable[[], Any], answer: Answer) -> None:
    try:
        answer.put((True, call()))
    except BaseException as error:
        answer.put((False, error))
