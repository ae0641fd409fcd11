"""A run as it is at this moment, from its folder alone: also one that has ended, or was killed. Pure.

Of metrics.jsonl the end is read, so that a look costs the same however long the run is.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import ValidationError

from zero3d.checkpoint.folders import newest
from zero3d.checkpoint.place import URL
from zero3d.errors import DataError
from zero3d.records import CHECKPOINTS, CONFIG, METRICS, PLAN
from zero3d.report.contents import is_locked
from zero3d.report.lines import Metrics, by_rank, number, parse, seconds_by
from zero3d.report.plan_file import PlanFile

END = 4 << 20
"""Bytes of metrics.jsonl that are read."""
RECENT = 20
"""Steps whose median says how fast it goes."""
MOST_NOTICES = 5
PATIENCE, STEPS_LATE = 30.0, 10
"""No line for so many seconds, and the time of so many steps: then it is late, or gone where nobody holds the lock."""
State = Literal["starting", "running", "late", "done", "stopped", "ended"]


@dataclass(frozen=True, kw_only=True)
class Now:
    """state: "late": it runs, and no step comes; "ended": without a last line, as a run that was killed. Loss in nats
    per target; seconds and bytes of a step. By kind: held_bytes: of the rank that holds most, `measured` or as
    planned. By rank: memory_bytes, busy_seconds; by axis, of rank 0: sent_bytes, waited_seconds. What nobody knows is
    None or empty."""

    run: str
    state: State
    step: int
    steps: int | None
    loss: float | None
    losses: Sequence[float]
    bits_per_nat: float | None
    grad_norm: float | None
    lr: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    seconds_left: float | None
    silent_seconds: float | None
    layout: str
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    measured: bool = False
    memory_bytes: Sequence[int] = ()
    busy_seconds: Sequence[float] = ()
    waited_seconds: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    notices: Sequence[Mapping[str, Any]] = ()
    heldout_loss: float | None = None
    told: str = ""

    @property
    def skew(self) -> float | None:
        """How much longer the busiest rank is busy than the median one, as a part of that."""
        middle = median(self.busy_seconds) if self.busy_seconds else 0.0
        return max(self.busy_seconds) / middle - 1 if middle > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """For programs; the course of the loss is in metrics.jsonl."""
        found = {**asdict(self), "skew": self.skew}
        del found["losses"]
        return found


def look(folder: Path, now: float) -> Now:
    """The run of `folder`, which `places.find` has found to be one, at the time `now`."""
    metrics, changed = _metrics(folder / METRICS)
    plan = _plan(folder / PLAN)
    values = _values(folder / CONFIG)
    recent = metrics.steps[-RECENT:]
    last = metrics.steps[-1] if metrics.steps else None
    seconds = _finite(median(one.seconds for one in recent)) if recent else None
    tokens = _finite(median(one.tokens_per_second for one in recent)) if recent else None
    silent = max(now - changed, 0.0) if changed is not None else None
    state = _state(folder, metrics, silent, seconds)
    steps = plan.steps if plan else None
    left = (steps - last.number) * seconds if steps and last and seconds and state in ("running", "late") else None
    held = by_rank(metrics.done.get("held_bytes")) if metrics.done else {}
    ranks = metrics.ranks or {}
    return Now(
        run=str(values.get("run", {}).get("name") or folder.resolve().name),
        state=state,
        step=metrics.last_step,
        steps=steps,
        loss=_finite(last.loss) if last else None,
        losses=[one.loss for one in metrics.steps],
        bits_per_nat=plan.bits_per_nat if plan else None,
        grad_norm=_finite(last.grad_norm) if last else None,
        lr=_finite(last.lr) if last else None,
        step_seconds=seconds,
        tokens_per_second=tokens,
        mfu=_finite(last.mfu) if last else None,
        seconds_left=left,
        silent_seconds=silent if state in ("running", "late", "ended") else None,
        layout=_layout(plan),
        held_bytes={kind: max(one) for kind, one in (held or (plan.held_bytes if plan else {})).items() if any(one)},
        measured=bool(held),
        memory_bytes=[int(one) for one in _numbers(ranks.get("memory_bytes"))],
        busy_seconds=_numbers(ranks.get("busy_seconds")),
        waited_seconds=seconds_by(ranks.get("waited_seconds")),
        sent_bytes=seconds_by(ranks.get("sent_bytes")),
        checkpoint=_checkpoint(folder, values, metrics),
        notices=metrics.notices[-MOST_NOTICES:],
        heldout_loss=_finite(number(metrics.done.get("heldout_loss"))) if metrics.done else None,
        told=str(metrics.stopped.get("message", "")) if metrics.stopped else "",
    )


def _metrics(path: Path) -> tuple[Metrics, float | None]:
    """What its end says, and when it was written last."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - END, 0))
            text = file.read().decode("utf-8", errors="replace")
        changed = path.stat().st_mtime
    except OSError:
        return Metrics(), None
    if size > END:
        text = text.partition("\n")[2]
    # A line that is being written is read the next time.
    return parse(text[: text.rfind("\n") + 1]), changed


def _plan(path: Path) -> PlanFile | None:
    try:
        return PlanFile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        return None


def _values(path: Path) -> Mapping[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {section: keys for section, keys in tree.items() if isinstance(keys, dict)}


def _state(folder: Path, metrics: Metrics, silent: float | None, seconds: float | None) -> State:
    if metrics.done:
        return "done"
    if metrics.stopped:
        return "stopped"
    late = silent is None or silent > max(PATIENCE, STEPS_LATE * (seconds or 0.0))
    if is_locked(folder):
        return "starting" if not metrics.steps else "late" if late else "running"
    # Under a launcher of its own nobody holds the lock: what was written a moment ago is all there is to go by.
    return "ended" if late else "running"


def _layout(plan: PlanFile | None) -> str:
    return f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp}, ZeRO {plan.level}" if plan else ""


def _checkpoint(folder: Path, values: Mapping[str, Any], metrics: Metrics) -> str | None:
    """The newest whole one; of a URL, which is not looked at, what the run itself has said last."""
    place = values.get("checkpoint", {}).get("folder") or str(folder / CHECKPOINTS)
    if URL.match(str(place)):
        end = metrics.done or metrics.stopped
        return str(end["checkpoint"]) if end and end.get("checkpoint") else None
    try:
        return newest(str(place)).path.name
    except (DataError, OSError):
        return None


def _numbers(value: object) -> list[float]:
    found = [number(one) for one in value] if isinstance(value, list) else []
    return found if all(math.isfinite(one) for one in found) else []


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
