"""The `Watcher` of a run that nobody watches."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from zero3d.contracts import Pending

if TYPE_CHECKING:
    from zero3d.contracts import Watched
    from zero3d.pipeline.action import Action

_NOTHING = nullcontext()


class Unwatched:
    """Keeps nothing, and asks for no time."""

    def acting(self, action: "Action") -> AbstractContextManager[None]:
        return _NOTHING

    def doing(self, what: str) -> AbstractContextManager[None]:
        return _NOTHING

    def calling(self, axis: str, verb: str, label: str, nbytes: int) -> "Watched":
        return _as_it_is

    def queueing(self, queue: str, what: str) -> AbstractContextManager[None]:
        return _NOTHING


def _as_it_is(pending: Pending) -> Pending:
    return pending


UNWATCHED = Unwatched()
