"""Tells ranks that wait for each other from ranks that are slow, and wakes them with an error.

    rank 0 waits for rank 1 in the all-gather of A, which rank 1 has not begun
    rank 1 waits for rank 0 in the all-gather of B, which rank 0 has not begun      a circle: they have diverged

Every rank says before each wait whom it waits for; a thread of the process looks on. A wait that lasts is written to
the board, a key-value store that all ranks see, with how often this rank has begun each collective call. From rank to
rank the thread then follows who waits for whom. A rank that computes, or a message that is on its way, ends the walk:
nothing has diverged as far as can be told. Only a circle can never be left.

What was read of ranks one after the other need not have been true at one time. So all of the circle must be seen
`LOOKS` times, each rank having looked at its own wait again in between, and found the same one.

The first to find a circle writes a verdict. Each rank notes it before it says so, and is woken, by a message that
fits what it waits for, once all have, or soon: no one takes what wakes it for data.
"""

import json
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from zero3d.comm.apart import Standing, told
from zero3d.comm.guarded import Board, GuardedBoard, UnansweredError
from zero3d.comm.where import call_of, lines_of
from zero3d.contracts import Pending
from zero3d.errors import DivergedError, Zero3dError

EVERY = 0.4
"""Seconds between two looks; a quarter of that once there is a verdict."""
PATIENCE = 2.0
"""Seconds that a wait may last before it is written down."""
LOOKS = 3
"""How often a circle is seen again before it is believed."""
GRACE = 1.5
"""Seconds in which all ranks may take note of a verdict; those that compute look at the board no sooner than needed."""


class Meeting(NamedTuple):
    """The `turn`-th time that this rank makes a call; `mate`: what the other ranks call it (a receive's is a send)."""

    what: str
    group: str
    mate: str
    turn: int
    tag: int


class Leg(NamedTuple):
    """What is waited for within a meeting. way: "in" from `peer`, "out" to it, "both" at once; `data`: a tensor."""

    work: Any
    way: str
    peer: int
    data: Any


class Wait(NamedTuple):
    """A wait under way, of a thread."""

    meeting: Meeting
    leg: Leg
    thread: int


Meet = Callable[[str, str, int, int, int], Any]
"""meet(group, way, peer, tag, num_bytes): plays the other side of a peer's leg."""


class Lookout:
    """One a process: it has one rank, whatever groups that is in. Without a board it never looks."""

    def __init__(self) -> None:
        self.at: Wait | None = None
        self.step = 0
        self.verdict: DivergedError | None = None
        self.under_way: dict[int, Pending] = {}
        self._begun: dict[str, int] = {}
        self._come: dict[str, int] = {}
        self._board: Board | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, board: GuardedBoard, patience: float, rank: int, size: int, meet: Meet) -> None:
        """patience: seconds for which a roll call may wait for the board."""
        self._board, self._rank, self._size, self._meet = board, rank, size, meet
        self._patient = board.patient(patience)
        self._last: Wait | None = None
        self._since = 0.0
        self._number = self._beat = self._seen = 0
        self._circle: dict[int, tuple[int, int]] = {}
        self._reports: dict[int, dict[str, Any]] = {}
        self._said: set[str] = set()
        self._judged = 0.0
        self._woken: dict[int, tuple[int, Any]] = {}
        self._thread = threading.Thread(target=self._run, name="zero3d lookout", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """The process ends: what it sent last is still on its way to ranks that want it. Not after an error, which
        other ranks shall see at once."""
        try:
            while self.under_way and not hasattr(sys, "last_value"):
                next(iter(self.under_way.values())).wait()
        except Zero3dError:
            pass
        self.stop()

    def stop(self) -> None:
        """Before the interpreter ends, under which a thread must not be in native code."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def meeting(self, what: str, group: str, mine: str, mate: str, tag: int) -> Meeting:
        """Counts that this rank begins what it calls `mine` and the others `mate`."""
        key = f"{group} {mine}"
        turn = self._begun[key] = self._begun.get(key, 0) + 1
        return Meeting(what, group, f"{group} {mate}", turn, tag)

    def check(self) -> None:
        """Raises `DivergedError` once ranks are known to have diverged."""
        if self.verdict is not None:
            raise DivergedError(self.verdict.message, hint=self.verdict.hint)

    def lost(self, peer: int) -> int:
        """A wait for `peer` failed. Raises `DivergedError` if that is why; else gives the rank that was lost first."""
        self.check()
        if self._board is None:
            return peer
        with self._lock:
            try:
                self._take_note()
                first = int(self._board.compare_set("lost", "", str(peer)))
            except (RuntimeError, ValueError):
                first = peer  # The board is gone with its rank.
        self.check()
        return first if first != self._rank else peer

    def here(self, what: str, change: int = 1) -> int:
        """This rank has come to `what`, once more (-1: it left again). -> how many ranks have not come to it
        that often; 0 without a board. A change of 0 only asks."""
        if self._board is None:
            return 0
        with self._lock:
            turn = self._come.get(what, 0) + max(change, 0)
            self._come[what] = turn + min(change, 0)
            if change:
                self._patient.set(f"at {what} {self._rank}", str(self._come[what]))
            return self._size - self._patient.add(f"at {what}, time {turn}", change)

    def absent(self, what: str) -> list[int]:
        """The ranks that have not come to `what` as often as this one."""
        with self._lock:
            turn = self._come[what]
            return [rank for rank in range(self._size) if int(self._find(f"at {what} {rank}") or 0) < turn]

    def doing(self, peer: int) -> str:
        """What `peer` did when this rank last looked, for errors."""
        if self._board is None:
            return ""
        with self._lock:
            try:
                read = self._read(peer)
            except UnansweredError:
                return "the store of rank 0's machine does not answer either: the link to it is cut, or it is gone"
            except RuntimeError:
                return ""
        if read is None:
            return f"rank {peer} waits for no one: it computes, is held up or stopped, has ended, or its link is cut"
        return f"rank {peer} waits for the {self._reports[peer]['what']}"

    def _run(self) -> None:
        while not self._stopped.wait(EVERY / 4 if self.verdict else EVERY):
            with self._lock:
                try:
                    self._look(time.monotonic())
                except UnansweredError:
                    continue  # The link is slow, or cut: it may come back.
                except RuntimeError:
                    return  # The board is gone, or a group is: waits end by themselves then.

    def _look(self, now: float) -> None:
        at = self.at
        if at is not self._last:
            self._quit_report()
            self._last, self._since, self._circle, self._seen = at, now, {}, 0
            self._number += 1
        if at is not None and now - self._since > EVERY:
            self._take_note()
        if self.verdict is None and (at is None or now - self._since < PATIENCE):
            return
        if at is not None:
            self._report(at)
            if self.verdict is None and self._is_closed(self._walk()):
                self._judge()
        if self.verdict is not None:
            self._wake(now)

    def _report(self, at: Wait) -> None:
        """Writes down where this rank waits, and that it still does."""
        if "report" not in self._said:
            begun = {str(_short(key)): count for key, count in dict(self._begun).items()}
            report = {
                "number": self._number,
                "what": at.meeting.what,
                "group": at.meeting.group,
                "mate": str(_short(at.meeting.mate)),
                "turn": at.meeting.turn,
                "tag": at.meeting.tag,
                "way": at.leg.way,
                "peer": at.leg.peer,
                "bytes": at.leg.data.nbytes,
                "step": self.step,
                "call": call_of(at.thread),
                "lines": lines_of(at.thread),
                "begun": begun,
            }
            if self.at is not at:  # It went on meanwhile: what was counted may be later than the wait.
                return
            self._write(f"report {self._rank}", json.dumps(report))
            self._said.add("report")
        if self.at is at:
            self._beat += 1
            self._write(f"waits {self._rank}", f"{self._number} {self._beat}")

    def _quit_report(self) -> None:
        if "report" in self._said:
            self._write(f"waits {self._rank}", "")
            self._said.discard("report")

    def _read(self, rank: int) -> tuple[int, int] | None:
        """(number, beat) of the wait of `rank`, whose report is then known; None if it does not wait, for long."""
        words = self._find(f"waits {rank}").split()
        if not words:
            return None
        number, beat = map(int, words)
        if self._reports.get(rank, {}).get("number") != number:
            self._reports[rank] = json.loads(self._find(f"report {rank}"))
            if self._reports[rank]["number"] != number:
                return None
        return number, beat

    def _walk(self) -> dict[int, tuple[int, int]]:
        """(number, beat) of the waits from mine on, each of which needs the next; empty unless they close a circle."""
        found: dict[int, tuple[int, int]] = {}
        rank = self._rank
        while rank not in found:
            read = self._read(rank)
            if read is None:
                return {}
            found[rank] = read
            waiting = self._reports[rank]
            rank = waiting["peer"]
            if rank < 0 or self._read(rank) is None:
                return {}
            if self._reports[rank]["begun"].get(waiting["mate"], 0) >= waiting["turn"]:
                return {}  # What it waits for is on its way.
        return found

    def _is_closed(self, circle: dict[int, tuple[int, int]]) -> bool:
        """Whether this circle has been seen so often that it was there at one time."""
        before = self._circle
        same = {rank: number for rank, (number, _) in circle.items()} == {
            rank: number for rank, (number, _) in before.items()
        }
        if not circle or not same:
            self._circle, self._seen = circle, 0
        elif all(beat > before[rank][1] for rank, (_, beat) in circle.items()):
            self._circle = circle
            self._seen += 1
        return self._seen >= LOOKS

    def _judge(self) -> None:
        waiting = [rank for rank in range(self._size) if self._read(rank) is not None]
        standings = [
            Standing(
                rank=rank,
                what=self._reports[rank]["what"],
                step=self._reports[rank]["step"],
                call=self._reports[rank]["call"],
                lines=self._reports[rank]["lines"],
            )
            for rank in waiting
        ]
        message, hint = told(standings)
        assert self._board is not None
        self._board.compare_set("verdict", "", json.dumps({"message": message, "hint": hint}))
        self._take_note()

    def _take_note(self) -> None:
        if self.verdict is None:
            text = self._find("verdict")
            if text:
                verdict = json.loads(text)
                self.verdict = DivergedError(verdict["message"], hint=verdict["hint"])
                self._judged = time.monotonic()
        if self.verdict is not None and "noted" not in self._said:
            self._write(f"noted {self._rank}", "yes")
            self._said.add("noted")

    def _wake(self, now: float) -> None:
        """Ranks that wait for me, and know of the verdict, get something that fits."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        noted = [rank for rank in others if self._find(f"noted {rank}")]
        if len(noted) < len(others) and now - self._judged < GRACE:
            return
        for rank in noted:
            read = self._read(rank)
            if read is None or self._reports[rank]["peer"] != self._rank or self._woken.get(rank, (0,))[0] == read[0]:
                continue
            one = self._reports[rank]
            # Calls of one kind are matched by their number: the other side joins mine before it makes any of its own.
            if one["way"] != "both" and self.at is not None and self.at.leg.way == "both":
                continue
            self._woken[rank] = (read[0], self._meet(one["group"], one["way"], rank, one["tag"], one["bytes"]))

    def _find(self, key: str) -> str:
        assert self._board is not None
        return self._board.get(key).decode() if self._board.check([key]) else ""

    def _write(self, key: str, value: str) -> None:
        assert self._board is not None
        self._board.set(key, value)


def _short(text: str) -> int:
    return zlib.crc32(text.encode())
