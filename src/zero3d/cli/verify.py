"""`zero3d verify CONFIG`: a few steps of the training that CONFIG says, compared with one plain process.

Checks and starts ranks as `train` does. Rank 0 tells what was found and leaves it in run.out, where the process that
the user started reads the verdict.
"""

import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero3d.cli import train
from zero3d.cli.options import AllowCode, AsJson, ConfigPath, Debug, Options, Ranks, Settings
from zero3d.cli.rank import PARENT, started_as
from zero3d.cli.tables import axes_text
from zero3d.config import Config
from zero3d.records import as_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zero3d.comparison import Comparison, Row

RECORD = "verify.jsonl"
"""In run.out: the lines of `--json`."""
DIFFERENT = 4
"""What the command leaves with where the layout and the plain process differ."""
CAUSES = {
    "gradient": "Gradients differ before any update: see whether the module that uses it depends on its rank, keeps a "
    "state of its own, or looks at other samples of the batch. Is it the same on one rank (-n 1 --set parallel.dp=1)?",
    "weight": "Gradients of the first step agree and the update does not: see whether the optimizer, or a forward that "
    "writes to weights, depends on anything but weight and gradient.",
    "gradient norm": "All that was compared beside it agrees: see whether some parameter is used on some ranks only.",
    "loss": "Weights and gradients agree: see what else the loss depends on.",
}
"""What to do, by the kind of what differs first."""


def command(
    config: ConfigPath,
    ranks: Ranks = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare.")] = 5,
    settings: Settings = None,
    as_json: AsJson = False,
    allow_code: AllowCode = False,
    debug: Debug = False,
) -> None:
    """Compare the training that CONFIG says with the same in one plain process."""
    options = Options(
        config=config,
        settings=tuple(settings or ()),
        ranks=ranks,
        json=as_json,
        debug=debug,
        allow_code=allow_code,
        verb="verify",
        more=("--steps", str(steps)),
    )
    failed = train.run_verb(options, partial(_verify_on_rank, steps))
    rank, _ = started_as(os.environ) or (0, 1)
    # A parent reads the verdict by itself: to it a rank that found a difference has done its work.
    reads = rank == 0 and PARENT not in os.environ
    raise typer.Exit(failed or (_code_of(options) if reads else 0))


def _code_of(options: Options) -> int:
    """The exit code for what rank 0 left in run.out."""
    out = Path(Config.load(options.config, options.settings).run.out)
    last = json.loads((out / RECORD).read_text(encoding="utf-8").splitlines()[-1])
    return DIFFERENT if last["verdict"] == "different" else 0


def _verify_on_rank(steps: int, options: Options, rank: int, world: int) -> None:
    """In each process that `train.start` or torchrun started."""
    from zero3d.comparison import verify
    from zero3d.data.batches import Batches
    from zero3d.tensor.loss import next_token_loss

    config, prepared, build = train.read_on_rank(options, world)
    # Every key as one that was set: the batches are ours, of the size that even a silent default says.
    whole = Config.load(config.model_dump())
    data = whole.data
    batches = Batches(prepared.train, data.sequence_length, data.global_batch, whole.run.seed)
    found = verify(build, next_token_loss, map(batches.batch, range(steps)), whole.optimizer.name, whole)
    if rank == 0:
        _tell(found, whole, world, as_json=options.json)


def _tell(found: "Comparison", config: Config, world: int, *, as_json: bool) -> None:
    """To a program or to people, and into the run's folder."""
    from rich.console import Console

    out = Path(config.run.out)
    out.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{as_line(event)}\n" for event in events(found))
    (out / RECORD).write_text(text, encoding="utf-8")
    layout = layout_text(config, world)
    console = Console()
    if not console.is_terminal:
        console.width = train.FILE_WIDTH
    if as_json:
        print(text, end="", flush=True)
        return
    console.print(table(found, layout))
    for line in sentences(found, layout):
        console.print(line, highlight=False, markup=False, emoji=False)


def layout_text(config: Config, world: int) -> str:
    """Such as `dp 2, ZeRO level 2, optimizer on the host`."""
    axes, offload = axes_text(config.resolved(world, native_bf16=False)), config.offload
    parts = [axes, f"ZeRO level {config.zero.level}"]
    if offload.optimizer != "device":
        parts.append(f"optimizer on {'the host' if offload.optimizer == 'host' else 'disk'}")
    if offload.parameters == "host":
        parts.append("weights on the host")
    if offload.delayed_update:
        parts.append(f"updates delayed after {offload.delayed_update}")
    return ", ".join(parts)


def events(found: "Comparison") -> list[dict[str, object]]:
    """A line for each step and one at the end, as programs read them; differences are relative."""
    lines: list[dict[str, object]] = []
    for step, rows in found.steps.items():
        largest = {kind: _largest(rows, kind) for kind in ("loss", "gradient norm", "gradient", "weight")}
        lines.append(
            {
                "event": "compare",
                "step": step,
                "verdict": _worst(rows).verdict,
                "loss": largest["loss"],
                "grad_norm": largest["gradient norm"],
                "gradient": largest["gradient"],
                "weight": largest["weight"],
                "worst": _worst(rows).what,
            }
        )
    first = found.first_difference
    return [
        *lines,
        {
            "event": "done",
            "verdict": found.verdict,
            "steps": len(lines),
            "tolerance": found.tolerance,
            "first_difference": None
            if first is None
            else {
                "step": first.step,
                "kind": first.kind,
                "parameter": first.name or None,
                "difference": first.difference if math.isfinite(first.difference) else None,
            },
            "notes": list(found.notes),
        },
    ]


def table(found: "Comparison", layout: str) -> "RenderableType":
    """One line a step: the relative differences of its loss, norm, gradients and weights."""
    from zero3d.cli.plain_table import PlainTable

    shown = PlainTable(
        f"Relative differences between {layout}, and one plain process",
        ["step", "verdict"],
        ["loss", "norm", "gradients", "weights"],
        ["most different"],
        drop=["most different", "gradients", "norm"],
    )
    styles = {"different": "bold red", "close": None, "equal": "green"}
    for step, rows in found.steps.items():
        worst = _worst(rows)
        numbers = [_shown(_largest(rows, kind)) for kind in ("loss", "gradient norm", "gradient", "weight")]
        most = worst.what if worst.difference else ""
        shown.add_row(str(step), worst.verdict, *numbers, most, style=styles[worst.verdict])
    return shown


def sentences(found: "Comparison", layout: str) -> list[str]:
    """The verdict, what to do about it, and what the comparison does not show."""
    steps = len(found.steps)
    over = f"over {steps} step{'s' * (steps > 1)}"
    first = found.first_difference
    if first is not None:
        told = [
            f"Different: the first to differ is the {first.what}, in step {first.step}, by {_shown(first.difference)} "
            f"of its largest element (close is up to {found.tolerance:.0e}).",
            CAUSES[first.kind],
        ]
    elif found.verdict == "equal":
        told = [f"Equal: {layout}, and one plain process have the same bits {over}."]
    else:
        told = [f"Close: {layout}, and one plain process agree within {found.tolerance:.0e} {over}."]
    return [*told, *(f"Note: {note}" for note in found.notes)]


def _worst(rows: "Sequence[Row]") -> "Row":
    from zero3d.comparison import worst

    return worst(rows)


def _largest(rows: "Sequence[Row]", kind: str) -> float | None:
    """The largest difference of a kind; None: none of that kind was compared in that step."""
    return max((row.difference for row in rows if row.kind == kind), default=None)


def _shown(difference: float | None) -> str:
    if difference is None:
        return "-"
    return f"{difference:.1e}" if difference else "0"
