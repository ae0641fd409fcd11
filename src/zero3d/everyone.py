"""All who are told how a run goes, as one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero3d.reports import StepReport
    from zero3d.stopping import Stopped
    from zero3d.train import Listener, Plan, Summary
    from zero3d.watching.notice import Notice
    from zero3d.watching.watch import RanksReport


class Everyone:
    """Tells each listener, in their order."""

    def __init__(self, listeners: "Sequence[Listener]") -> None:
        self._listeners = listeners

    def started(self, plan: "Plan") -> None:
        for one in self._listeners:
            one.started(plan)

    def stepped(self, report: "StepReport", notices: "Sequence[Notice]", ranks: "RanksReport | None") -> None:
        """A step, and what was noticed in it."""
        for one in self._listeners:
            one.stepped(report)
            for notice in notices:
                one.noticed(notice)
            if ranks is not None:
                one.compared(ranks)

    def working_on(self, what: str) -> None:
        for one in self._listeners:
            one.working_on(what)

    def done(self, summary: "Summary") -> None:
        for one in self._listeners:
            one.done(summary)

    def stopped(self, stopped: "Stopped") -> None:
        for one in self._listeners:
            one.stopped(stopped)

    def close(self) -> None:
        for one in self._listeners:
            one.close()
