"""`verify`: promise 1 on the user's own model. Trains in the asked layout and in one plain process, and compares."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.comm.mesh import open_mesh
from zero3d.config import Config
from zero3d.contracts import Batch, Loss, ModelSource, OptimizerChoice
from zero3d.engine import Engine
from zero3d.errors import UsageError
from zero3d.layout import Layout
from zero3d.pipeline.calling import Call, split
from zero3d.plain import Plain, PlainStep, copy_of, fill
from zero3d.precision import NAMES
from zero3d.reports import StepReport
from zero3d.trees import tensors_in

EQUAL, CLOSE, DIFFERENT = "equal", "close", "different"
STEPS = 5
"""How often one batch is trained on."""
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LOOSER = 10.0
"""In 16 bits gradients may differ so many times as much as losses, which average their errors."""
ROUNDING = 1e-6
"""What gradients may differ by for rounding alone, as a part of the model's largest element. Some consist of nothing
else, such as those of an attention's key bias, and Adam makes steps of full length of them, in any direction."""
LEAST = 1e-30
"""The difference of what is not equal in every bit, where all that differs is excused."""
LOSS, NORM, GRADIENT, WEIGHT = "loss", "gradient norm", "gradient", "weight"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison. kind: loss, gradient norm, gradient or weight; name: the parameter's, "" for the first two;
    difference: the largest of any element, as a part of the largest element in the plain process."""

    step: int
    kind: str
    name: str
    difference: float
    verdict: str

    @property
    def what(self) -> str:
        """Such as `gradient of blocks.0.up.weight`."""
        return f"{self.kind} of {self.name}" if self.name else self.kind


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `verify` found, the same on every rank.

    rows: by step; in each loss, gradient norm, gradients (in the first step) and weights, in the model's order;
    tolerance: the largest difference that is close; notes: sentences on what the comparison does not show.
    """

    rows: tuple[Row, ...]
    tolerance: float
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The worst of all rows: "equal" (every bit), "close" or "different"."""
        return worst(self.rows).verdict

    @property
    def first_difference(self) -> Row | None:
        """Of the first step with a difference: the first parameter whose gradient differs, else the first whose weight
        does, else the norm or the loss. None: nothing is different."""
        order = (GRADIENT, WEIGHT, NORM, LOSS)
        found = [row for row in self.rows if row.verdict == DIFFERENT]
        return min(found, key=lambda row: (row.step, order.index(row.kind)), default=None)

    @property
    def steps(self) -> dict[int, list[Row]]:
        """The rows of each step that was compared."""
        numbers = sorted({row.step for row in self.rows})
        return {number: [row for row in self.rows if row.step == number] for number in numbers}


def worst(rows: Iterable[Row]) -> Row:
    """The row with the worst verdict, of those the one with the largest difference."""
    return max(rows, key=lambda row: ((EQUAL, CLOSE, DIFFERENT).index(row.verdict), row.difference))


def verify(
    model: ModelSource,
    loss: Loss,
    batches: Batch | Iterable[Batch],
    optimizer: OptimizerChoice | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    call: Call | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Trains a copy of `model` on the started ranks, and another one in a plain process, and compares. Collective.

    batches: *global* batches, a step each: a list, a loader, an iterator. A tensor, tuple or dict is one batch, which
        is trained on for five steps. Each is cut along the first dim of its tensors, a part for each dp index.
    tolerance: the largest relative difference that is close; 1e-5 in fp32, 2e-2 in bf16, 4e-3 in fp16 if left out
    The rest is as for `Engine`. A module is left as it is. Every rank makes the plain training, so each must have room
    for the whole model and its optimizer state; what rank 0 found is given back on all of them.

    Raises `UsageError` where no step updated the weights, and what `Engine` raises.
    """
    given = Config.load(config if config is not None else {})
    bare = copy_of(model, given.run.seed)
    engine = Engine(copy.deepcopy(model) if isinstance(model, nn.Module) else model, loss, optimizer, given, call=call)
    try:
        fill(bare, engine.full_state_dict(), engine.model.named_buffers(remove_duplicate=False))
        chosen = engine.config.optimizer.name if optimizer is None else optimizer
        plain = Plain(bare, loss, chosen, engine.config, engine.device, call)
        comparing = _Comparing(engine, plain, tolerance)
        for batch in _each(batches):
            comparing.step(batch)
        return comparing.result()
    finally:
        engine.close()


class _Comparing:
    """Both trainings, side by side."""

    def __init__(self, engine: Engine, plain: Plain, tolerance: float | None) -> None:
        self._engine, self._plain = engine, plain
        self._computes = _dtype(engine)
        self._tolerance = TOLERANCES[self._computes] if tolerance is None else tolerance
        self._rows: list[tuple[int, str, str, float]] = []
        self._skipped: list[int] = []
        self._before = {name: weight.clone() for name, weight in plain.weights.items()}
        self._astray = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in self._before.items()}
        self._excused = dict.fromkeys(self._before, 0)

    def step(self, batch: Batch) -> None:
        """One step of both on a global batch."""
        engine = self._engine
        shares = _shares(batch, engine.dp_size, engine.device)
        report = engine.step(shares[engine.dp_index])
        micro_batches = [split(share, engine.config.parallel.micro_batch, engine.device) for share in shares]
        plain = self._plain.step(micro_batches, report.step - 1, update=not report.skipped)
        if report.skipped:
            self._skipped.append(report.step)
        else:
            self._compare(report, plain)

    def result(self) -> Comparison:
        """As rank 0 sees it: of a model that depends on its rank each rank makes another plain training."""
        if not self._rows:
            raise UsageError(
                "there is nothing to compare: no step was made that updated weights",
                hint="Make at least one step; where fp16 has skipped them all, make more, or compare in fp32 or bf16.",
            )
        excused = list(map(float, self._excused.values()))
        numbers = _of_rank_0([*excused, *(difference for *_, difference in self._rows)], self._engine)
        rows = [
            Row(step=step, kind=kind, name=name, difference=found, verdict=self._verdict(kind, found))
            for (step, kind, name, _), found in zip(self._rows, numbers[len(excused) :], strict=True)
        ]
        counts = dict(zip(self._excused, map(int, numbers)))
        # Beside what is really different, what could be excused says nothing.
        notes = tuple(self._notes(counts if worst(rows).verdict != DIFFERENT else {}))
        return Comparison(rows=tuple(rows), tolerance=self._tolerance, notes=notes)

    def _compare(self, report: StepReport, plain: PlainStep) -> None:
        first = not self._rows
        self._rows.append((report.step, LOSS, "", _part(abs(report.loss - plain.loss), abs(plain.loss))))
        self._rows.append((report.step, NORM, "", _part(abs(report.grad_norm - plain.norm), plain.norm)))
        rounding = ROUNDING * max(map(_top, plain.gradients.values()), default=0.0)
        for name, theirs in plain.gradients.items() if first else ():
            self._add(report.step, GRADIENT, name, self._engine.grad_of(name), theirs, rounding)
        if self._computes == torch.float32:
            self._lead_astray(plain.gradients, rounding)
            state = self._engine.full_state_dict()
            for name, theirs in self._plain.weights.items():
                self._add(report.step, WEIGHT, name, state[name], theirs, self._astray[name])

    def _lead_astray(self, gradients: Mapping[str, Tensor], rounding: float) -> None:
        """How far rounding may have led each element of each weight: where half a gradient is rounding, an optimizer
        that looks at its sign and course alone, as Adam does, goes another way by half a step."""
        weights = self._plain.weights
        for name, gradient in gradients.items():
            part = (rounding / gradient.abs()).clamp(max=2.0)
            step = _top(weights[name] - self._before[name])
            self._astray[name] += torch.where(gradient != 0.0, part * step, 0.0)
            self._before[name].copy_(weights[name])

    def _add(self, step: int, kind: str, name: str, mine: Tensor, theirs: Tensor, explained: Tensor | float) -> None:
        """A row of one tensor. Elements that differ by no more than is `explained` by rounding are excused."""
        if torch.equal(mine, theirs):
            found = 0.0
        elif self._computes == torch.float32:
            error, scale = (mine.double() - theirs.double()).abs(), _top(theirs)
            excused = (error > self._tolerance * scale) & (error <= explained)
            self._excused[name] = max(self._excused[name], int(excused.sum()))
            found = _part(_top(error.masked_fill(excused, 0.0)), scale) or LEAST
        else:  # single elements say little in 16 bits
            found = _part(float((mine - theirs).norm()), float(theirs.norm()))
        self._rows.append((step, kind, name, found))

    def _verdict(self, kind: str, difference: float) -> str:
        looser = LOOSER if kind == GRADIENT and self._computes != torch.float32 else 1.0
        if difference == 0.0:
            return EQUAL
        return CLOSE if difference <= looser * self._tolerance else DIFFERENT

    def _notes(self, excused: Mapping[str, int]) -> Iterator[str]:
        """`excused`: how many elements of each parameter were."""
        if self._engine.notice:
            yield self._engine.notice
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self._engine.model.modules()):
            yield "The plain process has the same micro-batches, so what batch normalisation changes does not show."
        if self._computes != torch.float32:
            yield (
                f"In {str(self._computes).removeprefix('torch.')} weights are not compared: an optimizer such as Adam "
                'makes whole steps of what rounding does to small gradients. Set precision.compute = "fp32" to compare.'
            )
        names = [name for name, number in excused.items() if number]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield (
                f"{sum(excused.values()):,} elements differ by no more than rounding explains, in {names[0]}{more}: "
                "their gradients are too small beside the largest ones."
            )
        if self._skipped:
            yield f"Skipped, and so not compared: step {', '.join(map(str, self._skipped))}."


def _each(batches: Batch | Iterable[Batch]) -> Iterable[Batch]:
    """The global batches of all steps."""
    is_one = isinstance(batches, Tensor | tuple | Mapping) or not isinstance(batches, Iterable)
    return repeat(batches, STEPS) if is_one else batches


def _shares(batch: Batch, ranks: int, device: torch.device) -> list[Batch]:
    """A part of a global batch for each dp index; None where there are fewer samples than ranks."""
    samples = max((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), default=0)
    parts = split(batch, max(-(-samples // ranks), 1), device)
    return [*parts, *[None] * (ranks - len(parts))]


def _of_rank_0(numbers: list[float], engine: Engine) -> list[float]:
    parallel = engine.config.parallel
    assert parallel.dp != "auto", "resolved"
    layout = Layout(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp)
    mesh = open_mesh(layout, timedelta(seconds=engine.config.run.timeout_seconds))
    told = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
    for axis in mesh.axes.values():
        axis.broadcast(told, 0, "comparison").wait()
    found: list[float] = told.tolist()
    return found


def _part(error: float, scale: float) -> float:
    """`error` as a part of `scale`."""
    if error == 0.0:
        return 0.0
    return error / scale if scale else inf


def _top(tensor: Tensor) -> float:
    """The largest absolute value."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _dtype(engine: Engine) -> torch.dtype:
    """The one that rounds most, of those in which the engine computes and sends."""
    precision = engine.config.precision
    used = {NAMES.get(precision.compute, torch.float32), NAMES.get(precision.reduce, torch.float32)}
    if precision.compute not in NAMES:
        used |= {info.dtype for info in engine.parameters if info.trainable}
    return max(used & TOLERANCES.keys(), key=TOLERANCES.__getitem__)
