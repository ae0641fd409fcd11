"""Runs of one small GPT over dp x tp x pp, for tests of pipeline parallelism and for `tests/full_matrix.py`.

Every rank has as many samples as micro-batches, so how many there are decides the batch, and the reference with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

import zero3d
from tests import reference, tiny
from tests.world import run_ranks
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.losses import next_token_loss

LAYOUTS = [(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
"""dp, tp, pp"""
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbh1": 1, "zbh2": 1, "zbv": 2}
"""Stages on a rank."""
LEVELS = [0, 1, 2, 3]
MICRO_BATCHES = [1, 2, 3, 5, 8]
REDUCES = ["step", "micro-batch"]

STEPS = 2
LOOKED_AT = ["embedding.weight", "blocks.0.attention.qkv.weight", "blocks.5.mlp.down.weight", "head.weight"]
"""Whose gradients are compared: of the first stage, of some between, and of the last."""


@dataclass(frozen=True)
class Run:
    """One way to train. Those that differ in pp, schedule and level alone give the same bits."""

    layout: tuple[int, int, int]
    schedule: str
    level: int
    micro_batches: int
    reduce: str

    def __str__(self) -> str:
        dp, tp, pp = self.layout
        return f"{dp} x {tp} x {pp} {self.schedule} level {self.level} {self.micro_batches} mb {self.reduce}"

    @property
    def world(self) -> int:
        dp, tp, pp = self.layout
        return dp * tp * pp

    @property
    def unstaged(self) -> "Run":
        """The one without stages that has the same bits."""
        dp, tp, _ = self.layout
        return replace(self, layout=(dp, tp, 1), schedule="1f1b", level=0)

    def options(self) -> dict[str, Any]:
        dp, tp, pp = self.layout
        per_rank = SCHEDULES[self.schedule] if pp > 1 else 1
        stages = {"pp": pp, "schedule": self.schedule, "stages_per_rank": per_rank}
        return {
            "parallel": {"dp": dp, "tp": tp, "micro_batch": 1, **stages},
            "zero": {"level": self.level, "reduce": self.reduce, "bucket_mb": 0.01},
        }


@dataclass
class Trace:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def every_run() -> list[Run]:
    return [Run(*one) for one in product(LAYOUTS, SCHEDULES, LEVELS, MICRO_BATCHES, REDUCES)]


def all_pairs() -> list[Run]:
    """A few of `every_run` in which each value of each factor meets each value of all others."""
    left = {run: _pairs(run) for run in every_run()}
    missing = set().union(*left.values())
    chosen = []
    while missing:
        best = max(left, key=lambda run: len(left[run] & missing))
        missing -= left[best]
        chosen.append(best)
    return chosen


def _pairs(run: Run) -> set[Any]:
    values = enumerate((run.layout, run.schedule, run.level, run.micro_batches, run.reduce))
    return set(combinations(values, 2))


def made() -> GPT:
    torch.manual_seed(0)
    shape = {"vocabulary": tiny.VOCABULARY, "sequence_length": tiny.LENGTH}
    return GPT(GPTConfig(**shape, width=16, layers=8, heads=2, tied=False))


def loss(logits: Any, batch: dict[str, Tensor]) -> Any:
    return zero3d.cross_entropy(logits, batch["targets"])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # A gradient that is zero but for rounding must not become a step of full size.
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)


def train(run: Run) -> Trace:
    engine = zero3d.Engine(made(), loss, adamw, run.options())
    batches = tiny.batches(STEPS, run.micro_batches * engine.dp_size)
    reports = [engine.step(tiny.part(batch, engine.dp_index, engine.dp_size)) for batch in batches]
    gradients = {name: engine.grad_of(name) for name in LOOKED_AT}
    trace = Trace(
        [one.loss for one in reports], [one.grad_norm for one in reports], engine.full_state_dict(), gradients
    )
    engine.close()
    return trace


def train_all(runs: Sequence[Run]) -> list[Trace]:
    return [train(run) for run in runs]


def by_world(runs: Iterable[Run]) -> dict[int, list[Run]]:
    """Those that can share ranks which are forked once."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.world, []).append(run)
    return found


@cache
def plain(samples: int) -> reference.Trace:
    """The plain loop on global batches of `samples`."""
    [found] = run_ranks(1, _in_one_process, samples)
    trace: reference.Trace = found
    return trace


def _in_one_process(samples: int) -> reference.Trace:
    steps = [[batch] for batch in tiny.batches(STEPS, samples)]
    return reference.train(made(), next_token_loss, adamw, steps, call=lambda model, batch: model(batch["tokens"]))


def assert_same_bits(one: Trace, other: Trace, what: object, *, norms: bool = False) -> None:
    """`norms`: these too; over stages they are summed in other groups, and only close."""
    assert one.losses == other.losses, what
    if norms:
        assert one.norms == other.norms, what
    torch.testing.assert_close(one.norms, other.norms, rtol=1e-6, atol=0, msg=str(what))
    for mine, theirs in ((one.weights, other.weights), (one.gradients, other.gradients)):
        assert mine.keys() == theirs.keys(), what
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]), (what, name)


def assert_close(one: Trace, expected: reference.Trace, what: object) -> None:
    torch.testing.assert_close(one.losses, expected.losses, rtol=1e-5, atol=0, msg=str(what))
    torch.testing.assert_close(one.norms, expected.norms, rtol=1e-5, atol=0, msg=str(what))
    assert one.weights.keys() == expected.weights.keys()
    for name, value in one.weights.items():
        assert distance(value, expected.weights[name]) <= 1e-5, (what, name)
    for name, value in one.gradients.items():
        gradient = expected.gradients[name]
        assert gradient is not None and distance(value, gradient) <= 1e-5, (what, name)


def distance(mine: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((mine - other).abs().max() / other.abs().max().clamp(min=1e-30))
