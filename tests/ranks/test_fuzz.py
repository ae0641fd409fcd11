"""Random modules, levels, ranks, bucket sizes and micro-batches: trained as the plain loop trains them.

Close, 1e-5 in fp32. 300 models, the same in every run; 5,000 new ones are tried by
`pytest tests/ranks/test_fuzz.py --hypothesis-profile=long`.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zero3d
from tests import reference
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

STEPS, WIDTH, WORDS = 3, 6, 5
EACH = 10
"""Random models in one example of hypothesis: forking ranks costs more than training them."""
KINDS = ("linear", "bare", "conv", "norm", "embedding", "scalar", "odd", "mixture", "tied", "nested")


@dataclass(frozen=True)
class Plan:
    """One random model and how it is trained."""

    parts: tuple[str, ...]
    listed: bool
    order: tuple[int, ...]
    skips: bool
    branches: bool
    frozen: frozenset[int]
    tied: bool
    level: int
    ranks: int
    samples: int
    micro_batch: int
    bucket_mb: float
    prefetch: int
    overlap: bool
    reduce: str
    recompute: bool
    adam: bool
    clip: float
    uneven: bool


class Part(nn.Module):
    """One of `KINDS`."""

    def __init__(self, kind: str, shared: nn.Parameter) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("linear", "bare"):
            self.inner: Any = nn.Linear(WIDTH, WIDTH, bias=kind == "linear")
        elif kind == "conv":
            self.inner = nn.Conv1d(1, 2, 3, padding=1)
        elif kind == "norm":
            self.inner = nn.LayerNorm(WIDTH)
        elif kind == "embedding":
            self.inner = nn.Embedding(WORDS, WIDTH)
        elif kind == "scalar":
            self.scale = nn.Parameter(torch.tensor(0.5))
        elif kind == "odd":
            self.first = nn.Parameter(torch.randn(3, 1, 2) * 0.3)
            self.second = nn.Parameter(torch.randn(1) * 0.3)
        elif kind == "mixture":
            self.gate = nn.Linear(WIDTH, 2)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        elif kind == "tied":
            self.weight = shared
        else:
            self.inner = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "conv":
            return x + self.inner(x[:, None]).sum(1).tanh()
        if self.kind == "embedding":
            return x + self.inner((x.detach().sum(-1) * 10).long() % WORDS)
        if self.kind == "scalar":
            return x * self.scale
        if self.kind == "odd":
            return x + self.first.expand(3, 2, 2).reshape(2, WIDTH).sum(0) * self.second
        if self.kind == "mixture":
            gates, chosen = self.gate(x).softmax(-1), (x.detach().sum(-1) > 0).long()
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                if len(rows):  # an expert without samples does not run
                    out = out.index_add(0, rows, expert(x[rows]) * gates[rows, number, None])
            return x + out
        if self.kind == "tied":
            return x + F.linear(x, self.weight).tanh()
        if self.kind == "nested":
            for inner in self.inner:
                x = x + inner(x)
            return x
        return x + self.inner(x).tanh()


class Random(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        shared = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.enter = nn.Linear(WIDTH, WIDTH)
        parts = [Part(kind, shared) for kind in plan.parts]
        if plan.listed:
            self.blocks = nn.ModuleList(parts)
        else:
            for number, part in enumerate(parts):
                self.add_module(f"part{number}", part)
        self.one, self.other = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
        if plan.tied:
            self.leave.weight = self.enter.weight
        self.idle = nn.Linear(2, 3)
        self.register_buffer("offset", torch.full((WIDTH,), 0.1))
        for number, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(number not in plan.frozen)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        parts = (
            self.blocks if self.plan.listed else [self.get_submodule(f"part{n}") for n in range(len(self.plan.parts))]
        )
        x = self.enter(x) + self.offset
        for place, number in enumerate(self.plan.order):
            if not (self.plan.skips and (place + int(step[0])) % 3 == 2):  # the same on every rank
                x = parts[number](x)
        x = self.leave(x)
        if self.plan.branches and bool(x.detach().sum() > 0):  # each micro-batch its own
            return self.other(x)
        return self.one(x)


@st.composite
def plans(draw: st.DrawFn, ranks: int) -> Plan:
    parts = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)))
    return Plan(
        parts=parts,
        listed=draw(st.booleans()),
        order=tuple(draw(st.lists(st.integers(0, len(parts) - 1), min_size=1, max_size=6))),
        skips=draw(st.booleans()),
        branches=draw(st.booleans()),
        frozen=frozenset(draw(st.sets(st.integers(0, 20), max_size=6))),
        tied=draw(st.booleans()),
        level=draw(st.integers(0, 3)),
        ranks=ranks,
        samples=draw(st.integers(1, 4)),
        micro_batch=draw(st.integers(1, 4)),
        bucket_mb=draw(st.sampled_from((1e-6, 1e-4, 3e-4, 1.0))),
        prefetch=draw(st.integers(0, 2)),
        overlap=draw(st.booleans()),
        reduce=draw(st.sampled_from(("step", "micro-batch"))),
        recompute=draw(st.booleans()),
        adam=draw(st.booleans()),
        clip=draw(st.sampled_from((0.0, 0.5))),
        uneven=draw(st.booleans()),
    )


def build(plan: Plan) -> Random:
    torch.manual_seed(0)
    return Random(plan)


def loss(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (out - batch["target"]).square().sum(), torch.tensor(len(out))


def optimizer(plan: Plan) -> Any:
    if plan.adam:
        # A large eps: small gradients do not become steps of full size, in which rounding would show.
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2)
    return lambda parameters: torch.optim.SGD(parameters, lr=2e-2, momentum=0.9)


def part_of(plan: Plan, step: int, rank: int) -> dict[str, Tensor]:
    samples = max(plan.samples - (rank if plan.uneven else 0), 1)
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        "x": torch.randn(samples, WIDTH, generator=generator),
        "target": torch.randn(samples, 3, generator=generator),
        "step": torch.full((samples,), step),
    }


def micro_batches(plan: Plan, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    cuts = range(0, len(batch["x"]), plan.micro_batch)
    return [{key: value[at : at + plan.micro_batch] for key, value in batch.items()} for at in cuts]


def trained(plan: Plan) -> tuple[list[float], list[float], dict[str, Tensor]]:
    listed = plan.listed and len(plan.parts) > 1
    engine = zero3d.Engine(
        build(plan),
        loss,
        optimizer(plan),
        {
            "model": {"blocks": "blocks"} if plan.listed else {},
            "parallel": {"micro_batch": plan.micro_batch},
            "optimizer": {"clip_norm": plan.clip},
            "recompute": {"mode": "block" if plan.recompute and listed else "none"},
            "zero": {
                "level": plan.level,
                # Which experts run depends on a rank's samples.
                "keep_gathered": ["*experts*"] if "mixture" in plan.parts else [],
                "bucket_mb": plan.bucket_mb,
                "prefetch": plan.prefetch,
                "overlap": plan.overlap,
                "reduce": plan.reduce,
            },
        },
    )
    reports = [engine.step(part_of(plan, step, engine.rank)) for step in range(STEPS)]
    return [one.loss for one in reports], [one.grad_norm for one in reports], engine.full_state_dict()


def all_trained(some: list[Plan]) -> list[tuple[list[float], list[float], dict[str, Tensor]]]:
    found = []
    for plan in some:
        try:
            found.append(trained(plan))
        except Exception as error:
            error.add_note(str(plan))
            raise
    return found


def hold(some: list[Plan]) -> None:
    """Plans for one number of ranks, which are forked once for all of them."""
    by_rank = run_ranks(some[0].ranks, all_trained, some, timeout=120, group_timeout=20)
    for number, plan in enumerate(some):
        steps = [
            [micro for rank in range(plan.ranks) for micro in micro_batches(plan, part_of(plan, step, rank))]
            for step in range(STEPS)
        ]
        trace = reference.train(
            build(plan), loss, optimizer(plan), steps, call=lambda m, b: m(b["x"], b["step"]), clip=plan.clip
        )
        for losses, norms, weights in (found[number] for found in by_rank):
            assert losses == pytest.approx(trace.losses, rel=1e-5), plan
            assert norms == pytest.approx(trace.norms, rel=1e-5), plan
            assert weights.keys() == trace.weights.keys(), plan
            for name, value in trace.weights.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=2e-6, msg=f"{name}: {plan}")


@settings(deadline=None)  # the number of examples is the profile's
@given(some=st.sampled_from((1, 2, 2, 3)).flatmap(lambda ranks: st.lists(plans(ranks), min_size=EACH, max_size=EACH)))
def test_random_modules_train_as_the_plain_loop_trains_them(some: list[Plan]) -> None:
    hold(some)
