"""`--json`: stdout holds one JSON object a line and nothing else. The lines are those of metrics.jsonl."""

from typing import TYPE_CHECKING, TextIO

from zero3d.records import as_line, done_event, note_events, step_event

if TYPE_CHECKING:
    from zero3d.reports import StepReport
    from zero3d.train import Plan, Summary


class Events:
    """Notes if there are any, a line a step and one at the end, each written at once."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def started(self, plan: "Plan") -> None:
        for event in note_events(plan):
            print(as_line(event), file=self._out, flush=True)

    def stepped(self, report: "StepReport") -> None:
        print(as_line(step_event(report)), file=self._out, flush=True)

    def working_on(self, what: str) -> None:
        pass

    def done(self, summary: "Summary") -> None:
        print(as_line(done_event(summary)), file=self._out, flush=True)

    def close(self) -> None:
        pass
