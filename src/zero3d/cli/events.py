"""`--json`: stdout holds one JSON object a line and nothing else. The lines are those of metrics.jsonl."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from zero3d.listening import Listening
from zero3d.records import as_line, done_event, note_events, notice_event, ranks_event, step_event, stopped_event

if TYPE_CHECKING:
    from zero3d.reports import StepReport
    from zero3d.stopping import Stopped
    from zero3d.train import Plan, Summary
    from zero3d.watching.notice import Notice
    from zero3d.watching.watch import RanksReport


class Events(Listening):
    """Notes if there are any, a line a step and one at the end, each written at once."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def started(self, plan: "Plan") -> None:
        for event in note_events(plan):
            self._write(event)

    def stepped(self, report: "StepReport") -> None:
        self._write(step_event(report))

    def noticed(self, notice: "Notice") -> None:
        self._write(notice_event(notice))

    def compared(self, ranks: "RanksReport") -> None:
        self._write(ranks_event(ranks))

    def done(self, summary: "Summary") -> None:
        self._write(done_event(summary))

    def stopped(self, stopped: "Stopped") -> None:
        self._write(stopped_event(stopped))

    def _write(self, event: Mapping[str, object]) -> None:
        print(as_line(event), file=self._out, flush=True)
