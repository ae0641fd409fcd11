"""Calls under way, and what it means when one of them does not end as it should."""

from collections.abc import Callable, Sequence
from threading import get_ident

from zero3d.comm.lookout import Leg, Lookout, Meeting, Wait
from zero3d.errors import RankFailedError

HINT = "Every rank must make the same calls and run the same modules in a step; see the first rank that failed."


class Posted:
    """Calls under way and what is to be done once they are through."""

    def __init__(self, lookout: Lookout, meeting: Meeting, legs: Sequence[Leg], then: Callable[[], None]) -> None:
        self._lookout = lookout
        self.meeting = meeting
        self._legs = legs
        self._then: Callable[[], None] | None = then
        lookout.under_way[id(self)] = self

    def wait(self) -> None:
        """Once; gloo's own second wait would not return."""
        if self._then is None:
            return
        lookout, thread = self._lookout, get_ident()
        lookout.under_way.pop(id(self), None)
        lookout.check()
        for leg in self._legs:
            if leg.work is None:
                continue
            lookout.at = Wait(self.meeting, leg, thread)
            try:
                leg.work.wait()
            except RuntimeError as error:
                raise self._failed(leg, error) from error
            finally:
                lookout.at = None
            lookout.check()  # What came may be no data: it wakes a rank that would wait for ever.
        then, self._then = self._then, None
        then()

    def _failed(self, leg: Leg, error: RuntimeError) -> RankFailedError:
        """What a wait that failed means. Raises `DivergedError` where that is known to be the cause."""
        first, what = str(error).splitlines()[0][:200], self.meeting.what
        if "timed out" in first.lower() and leg.peer >= 0:
            self._lookout.check()
            doing = self._lookout.doing(leg.peer)
            return RankFailedError(
                f"rank {leg.peer} did not join the {what} within the time-out{doing and f'; {doing}'}",
                where=first,
                hint=HINT,
            )
        if leg.peer >= 0:
            lost = self._lookout.lost(leg.peer)
            passed = "" if lost == leg.peer else f", and rank {leg.peer} ended with it"
            return RankFailedError(f"rank {lost} is gone{passed}: waiting for the {what}", where=first, hint=HINT)
        return RankFailedError(f"another rank is gone or did not join the {what}", where=first, hint=HINT)
