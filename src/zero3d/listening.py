"""Who is told of a run, and leaves out most of it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero3d.reports import StepReport
    from zero3d.stopping import Stopped
    from zero3d.train import Plan, Summary
    from zero3d.watching.notice import Notice
    from zero3d.watching.watch import RanksReport


class Listening:
    """A `Listener` that takes no note of anything; those that do write over what they care for."""

    def started(self, plan: "Plan") -> None: ...

    def stepped(self, report: "StepReport") -> None: ...

    def noticed(self, notice: "Notice") -> None: ...

    def compared(self, ranks: "RanksReport") -> None: ...

    def working_on(self, what: str) -> None: ...

    def done(self, summary: "Summary") -> None: ...

    def stopped(self, stopped: "Stopped") -> None: ...

    def close(self) -> None: ...
