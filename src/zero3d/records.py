"""What a run writes into its folder: config.toml, plan.json, metrics.jsonl, TensorBoard files where that is.

The lines of metrics.jsonl are those of `--json`: notes if there are any, one a step, what was noticed, now and then how
ranks compare, one at the end. What an earlier run left in the folder is kept under another name.
"""

import importlib
import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from zero3d.listening import Listening
from zero3d.report import plan_file

if TYPE_CHECKING:
    from zero3d.reports import StepReport
    from zero3d.stopping import Stopped
    from zero3d.train import Plan, Summary
    from zero3d.watching.notice import Notice
    from zero3d.watching.watch import RanksReport

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
PLAN = "plan.json"
TENSORBOARD = "tensorboard"
TRACE = "trace.json"
TIMELINE = "timeline.svg"
CHECKPOINTS = "checkpoints"
KEPT = (METRICS, CONFIG, PLAN, TRACE, TIMELINE, CHECKPOINTS)
"""What a second run in the same folder would write over."""


def step_event(report: "StepReport") -> dict[str, object]:
    """A step as programs read it; `loss` in nats per counted target, the mean over the global batch; with offload what
    its seconds went into as well."""
    return {
        "event": "step",
        "step": report.step,
        "loss": report.loss,
        "tokens": report.tokens,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "skipped": report.skipped,
        "seconds": report.seconds,
        **({} if report.mfu is None else {"mfu": report.mfu}),
        **_offload(report.split),
    }


def note_events(plan: "Plan") -> list[dict[str, object]]:
    """What a user should know of how the run is done, before the first step; with offload its host memory too."""
    resumed = f"goes on from {plan.resumed}" if plan.resumed else ""
    return [{"event": "note", "message": message} for message in (resumed, plan.notice, plan.host_memory) if message]


def notice_event(notice: "Notice") -> dict[str, object]:
    """What was noticed in a step."""
    return {
        "event": "notice",
        "step": notice.step,
        "kind": notice.kind,
        "rank": notice.rank,
        "message": notice.message,
    }


def ranks_event(ranks: "RanksReport") -> dict[str, object]:
    """How ranks compare; seconds and bytes of a step, the mean over those since the last such line."""
    return {
        "event": "ranks",
        "step": ranks.step,
        "busy_seconds": [round(one, 6) for one in ranks.busy],
        "memory_bytes": list(ranks.memory),
        "waited_seconds": {axis: round(seconds, 6) for axis, seconds in ranks.waited.items()},
        "sent_bytes": dict(ranks.sent),
    }


def stopped_event(stopped: "Stopped") -> dict[str, object]:
    """The last line of a run that was asked to end."""
    return {
        "event": "stopped",
        "step": stopped.step,
        "steps": stopped.steps,
        "signal": stopped.signal,
        "checkpoint": None if stopped.checkpoint is None else str(stopped.checkpoint),
        "message": stopped.told,
    }


def done_event(summary: "Summary") -> dict[str, object]:
    """The last line of a run that came to its end."""
    return {
        "event": "done",
        "steps": summary.steps,
        "train_loss": summary.train_loss,
        "heldout_loss": summary.heldout_loss,
        "tokens_per_second": summary.tokens_per_second,
        "held_bytes": summary.held_bytes,
        "sent_bytes": summary.sent_bytes,
        **_offload(summary.offload),
        "checkpoint": None if summary.checkpoint is None else str(summary.checkpoint),
        "trace": None if summary.trace is None else str(summary.trace),
    }


def _offload(split: Mapping[str, float] | None) -> dict[str, object]:
    return {} if split is None else {"offload": dict(split)}


def as_line(event: Mapping[str, object]) -> str:
    """One line of JSON; numbers that JSON lacks (an overflowed norm) become null."""
    return json.dumps(
        {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in event.items()}
    )


def keep_earlier(folder: Path) -> list[str]:
    """Moves what an earlier run left in the folder to the next free number. -> their new names."""
    there = [folder / name for name in KEPT if (folder / name).exists()]
    number = 1
    while any(_numbered(folder / name, number).exists() for name in KEPT):
        number += 1
    for path in there:
        path.rename(_numbered(path, number))
    return [_numbered(path, number).name for path in there]


def steps_before(metrics: Path, first_step: int) -> list[str]:
    """The lines of a run up to the step from which it goes on; what came after is made again."""
    if not first_step or not metrics.exists():
        return []
    found = []
    for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            event = json.loads(line)
        except ValueError:  # cut short by the end of that run
            continue
        if event.get("event") == "note" or event.get("step", first_step + 1) <= first_step:
            found.append(line)
    return found


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


class RunFolder(Listening):
    """config.toml and plan.json at the start, a line of metrics.jsonl every `run.log_every` steps and one at the end.

    `kept`: what the records of an earlier run in the same folder are called now; known once started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: list[str] = []
        self._every = 1
        self._metrics: TextIO | None = None

    def started(self, plan: "Plan") -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        before = steps_before(self.folder / METRICS, plan.first_step)
        # What goes on from a checkpoint goes on in the same records.
        self.kept = [] if plan.first_step else keep_earlier(self.folder)
        text = "# The configuration of this run with everything resolved; it can be trained again as it is.\n\n"
        (self.folder / CONFIG).write_text(text + plan.config.to_toml(), encoding="utf-8")
        (self.folder / PLAN).write_text(plan_file.of_plan(plan).model_dump_json() + "\n", encoding="utf-8")
        self._every = plan.config.run.log_every
        # Line by line, and in one move what there was: it is there however and whenever the run ends.
        fresh = self.folder / f"{METRICS}.new"
        fresh.write_text("".join(before), encoding="utf-8")
        fresh.replace(self.folder / METRICS)
        self._metrics = open(self.folder / METRICS, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        for event in note_events(plan):
            self._write(event)

    def stepped(self, report: "StepReport") -> None:
        if report.step % self._every == 0:
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
        if self._metrics:
            self._metrics.write(as_line(event) + "\n")

    def close(self) -> None:
        if self._metrics:
            self._metrics.close()


class TensorBoard(Listening):
    """Loss, gradient norm, learning rate and speed as TensorBoard scalars; a subfolder a run."""

    @staticmethod
    def is_there() -> bool:
        return importlib.util.find_spec("tensorboard") is not None

    def __init__(self, folder: Path) -> None:
        self._folder = folder / TENSORBOARD
        self._writer: Any = None

    def started(self, plan: "Plan") -> None:
        number = 1
        while (self._folder / f"run-{number}").exists():
            number += 1
        folder = self._folder / f"run-{number}"
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
        self._writer.add_text("config", "```toml\n" + plan.config.to_toml() + "\n```")

    def stepped(self, report: "StepReport") -> None:
        scalars = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/tokens_per_second": report.tokens / report.seconds,
            **({} if report.mfu is None else {"train/mfu": report.mfu}),
            **{f"offload/{name}_seconds": seconds for name, seconds in (report.split or {}).items()},
        }
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, report.step)

    def done(self, summary: "Summary") -> None:
        self._writer.add_scalar("heldout/loss", summary.heldout_loss, summary.steps)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
