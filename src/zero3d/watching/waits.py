"""How long a rank waited for others in a step, by axis."""

import time
from collections import defaultdict

from zero3d.contracts import Pending, Watched
from zero3d.unwatched import Unwatched


class Waits(Unwatched):
    """A `Watcher` that keeps nothing else. On a GPU the host does not wait: its waits are none."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def calling(self, axis: str, verb: str, label: str, nbytes: int) -> Watched:
        def watched(pending: Pending) -> Pending:
            return _Timed(pending, axis, self.seconds)

        return watched


class _Timed:
    def __init__(self, pending: Pending, axis: str, seconds: defaultdict[str, float]) -> None:
        self._pending = pending
        self._axis = axis
        self._seconds = seconds

    def wait(self) -> None:
        began = time.perf_counter()
        self._pending.wait()
        self._seconds[self._axis] += time.perf_counter() - began
