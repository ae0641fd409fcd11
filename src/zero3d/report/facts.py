"""A run as JSON, for programs: the numbers of its page. Pure."""

import math
from typing import Any

from zero3d.report.contents import Run
from zero3d.report.holdings import holdings
from zero3d.report.lines import by_rank, number, seconds_by
from zero3d.report.traced import spent


def facts(run: Run, problems: list[str]) -> dict[str, Any]:
    """state: done, running or cut short; held_bytes: for each side that knows something, ranks and bytes by kind;
    spent: seconds of a traced step by rank; null or empty for what nobody knows."""
    done, layout = run.metrics.done or {}, run.layout
    return {
        "run": run.name,
        "state": run.state,
        "step": run.metrics.last_step,
        "steps": run.steps,
        "resumed": list(run.metrics.resumed),
        "layout": {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp} if layout else None,
        "train_loss": _finite(done.get("train_loss")),
        "heldout_loss": _finite(done.get("heldout_loss")),
        "tokens_per_second": _finite(done.get("tokens_per_second")),
        "held_bytes": [{"ranks": list(one.ranks), **one.sides} for one in holdings(run)],
        "sent_bytes": by_rank(done.get("sent_bytes")),
        "offload": {name: _finite(one) for name, one in seconds_by(done.get("offload")).items()},
        "spent": [{"rank": one.rank, **one.seconds} for one in (spent(run.trace) if run.trace else ())],
        "checkpoints": [{"name": one.name, "step": one.step, "whole": not one.why} for one in run.checkpoints],
        "problems": problems,
    }


def _finite(value: object) -> float | None:
    return found if math.isfinite(found := number(value)) else None
