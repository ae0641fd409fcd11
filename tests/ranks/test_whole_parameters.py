"""Optimizers that look at whole matrices: `zero.whole_parameters`, and an optimizer for each pattern of names.

Bit-equal: levels 0 to 3 among each other for the same `zero.reduce` and ranks, whoever owns a parameter and however its
bucket is cut. Close (1e-5): a plain loop with one optimizer over all parameters. Only torch's Muon is less close (1e-3
of the largest weight): it multiplies in bf16, where a gradient's last bits decide how an element is rounded. The same
in fp32 is as close as the rest.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

STEPS, SAMPLES = 3, 6
AUTO = {"whole_parameters": ["auto"]}
CASES = {
    "step": [(0, 16.0), (1, 16.0), (2, 0.03), (3, 16.0)],
    "micro-batch": [(0, 16.0), (1, 0.03), (2, 16.0), (3, 0.03)],
}
"""zero.reduce -> (level, bucket_mb). In small buckets many a matrix lies in the shard of one rank, others are cut."""


class RowNorm(torch.optim.Optimizer):
    """Each row moves by a step of the same length. Takes no vector: a vector is one row, which is not what it means."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    norm = p.grad.norm(dim=-1, keepdim=True) if p.dim() else p.grad.abs()
                    p.sub_(p.grad / (norm + 1e-3), alpha=group["lr"])


class Lamb(torch.optim.Optimizer):
    """Adam whose step is as long as a part of the weight: You et al. 2020, algorithm 2."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                mean = state["mean"].lerp_(p.grad, 0.1) / (1 - 0.9 ** state["step"])
                square = state["square"].mul_(0.95).addcmul_(p.grad, p.grad, value=0.05) / (1 - 0.95 ** state["step"])
                update = mean / (square.sqrt() + 1e-3) + 0.01 * p
                length, size = p.norm(), update.norm()
                trust = torch.where((length > 0) & (size > 0), length / size, torch.ones(()))
                p.sub_(update * trust, alpha=group["lr"])


class Fp32Muon(torch.optim.Optimizer):
    """Muon whose products are in fp32: momentum, made orthogonal by Newton-Schulz."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        if any(p.dim() != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("matrices alone")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    x = momentum / (momentum.norm() + 1e-3)
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * x @ x.t() @ x
                    p.sub_(x, alpha=group["lr"])


def row_norm(parameters: Any) -> torch.optim.Optimizer:
    return RowNorm(parameters, lr=2e-3)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=2e-3, weight_decay=0.01)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=2e-3, weight_decay=0.01)


def fp32_muon(parameters: Any) -> torch.optim.Optimizer:
    return Fp32Muon(parameters, lr=5e-3)


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return Lamb(parameters, lr=1e-2)


def for_matrices(one: Any, rest: Any) -> dict[str, Any]:
    return {"blocks.*.norm?.weight": rest, "blocks.*.weight": one, "*": rest}


CHOICES: dict[str, Any] = {
    "row norm": row_norm,
    "adafactor": adafactor,
    "lamb": lamb,
    "muon and adamw": for_matrices(muon, tiny.adamw),
    "fp32 muon and adamw": for_matrices(fp32_muon, tiny.adamw),
    "adamw": tiny.adamw,
}
TOLERANCE = {"muon and adamw": 1e-3}


class Odd(tiny.Tiny):
    """Tied embedding, a parameter without dims, one that is frozen, one that is not used, three dims."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.linspace(0.0, 1.0, 35).view(5, 7))
        self.mixing = nn.Conv1d(tiny.WIDTH, tiny.WIDTH, 3, padding="same", bias=False)
        self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        x = x + 0.1 * self.mixing(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.gain


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd()


class Several:
    """Torch optimizers as one, for the plain loop."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def zero_grad(self, set_to_none: bool) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def plain_optimizer(model: nn.Module, choice: Any) -> Callable[[Any], Any]:
    if not isinstance(choice, dict):
        return choice
    matrices = {id(p) for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2}
    return lambda trained: Several(
        [
            choice["blocks.*.weight"]([p for p in trained if id(p) in matrices]),
            tiny.adamw([p for p in trained if id(p) not in matrices]),
        ]
    )


def plain(name: str, ranks: int, micro_batch: int) -> reference.Trace:
    steps = []
    for batch in tiny.batches(STEPS, SAMPLES):
        parts = [tiny.part(batch, rank, ranks) for rank in range(ranks)]
        count = -(-SAMPLES // ranks // micro_batch)
        steps.append([{k: v.split(micro_batch)[i] for k, v in part.items()} for part in parts for i in range(count)])
    model = odd()
    make = plain_optimizer(model, CHOICES[name])
    return reference.train(model, tiny.loss, make, steps, call=lambda m, b: m(b["tokens"]), clip=0.5)


Trace = tuple[list[float], list[float], dict[str, Tensor]]


def trained(choice: Any, ranks: int, **sections: dict[str, Any]) -> tuple[zero3d.Engine, Trace]:
    config = {"optimizer": {"clip_norm": 0.5}, "parallel": {"micro_batch": 2}, **sections}
    engine = zero3d.Engine(odd(), tiny.loss, choice, config)
    reports = [engine.step(tiny.part(batch, engine.rank, ranks)) for batch in tiny.batches(STEPS, SAMPLES)]
    trace = [one.loss for one in reports], [one.grad_norm for one in reports], engine.full_state_dict()
    return engine, trace


def at_all_levels(name: str, ranks: int) -> dict[Any, Trace]:
    whole = {"whole_parameters": ["*"]} if name == "adamw" else AUTO
    return {
        (reduce, level, mb): trained(
            CHOICES[name], ranks, zero={"level": level, "reduce": reduce, "bucket_mb": mb, **whole}
        )[1]
        for reduce, cases in CASES.items()
        for level, mb in cases
    }


def same(one: Trace, other: Trace) -> bool:
    return (
        one[0] == other[0]
        and one[1] == other[1]
        and all(torch.equal(value, other[2][name]) for name, value in one[2].items())
    )


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("lamb", 1), *((name, 2) for name in CHOICES), ("adafactor", 3), ("fp32 muon and adamw", 3)],
)
def test_c78_levels_equal_each_other_and_the_plain_loop(name: str, ranks: int) -> None:
    [wanted] = run_ranks(1, plain, name, ranks, 2)
    results = run_ranks(ranks, at_all_levels, name, ranks)
    tolerance = TOLERANCE.get(name, 1e-5)
    for found in results:
        for case, trace in found.items():
            assert same(trace, results[0][case[0], 0, 16.0]), case
            losses, norms, weights = trace
            torch.testing.assert_close(losses, wanted.losses, rtol=tolerance, atol=0)
            torch.testing.assert_close(norms, wanted.norms, rtol=tolerance, atol=0)
            assert weights.keys() == wanted.weights.keys()
            for key, value in weights.items():
                error = (value - wanted.weights[key]).abs().max() / wanted.weights[key].abs().max()
                assert float(error) <= tolerance, (case, key, float(error))
                assert torch.equal(value, odd().state_dict()[key]) == (key in ("unused", "blocks.1.up.weight")), key


def in_16_bits(name: str) -> list[Trace]:
    return [
        trained(
            CHOICES[name],
            2,
            zero={"level": level, "reduce": "step", **AUTO},
            precision={"compute": "bf16", "gradients": gradients},
            parallel={"micro_batch": 6},
        )[1]
        for gradients in ("fp32", "compute")
        for level in range(4)
    ]


@pytest.mark.parametrize("name", ["lamb", "muon and adamw"])
def test_levels_are_equal_in_16_bits(name: str) -> None:
    for traces in run_ranks(2, in_16_bits, name):
        assert all(same(trace, traces[0]) for trace in traces[:4])
        assert all(same(trace, traces[4]) for trace in traces[4:])


def named(name: str) -> tuple[Trace, Trace]:
    """By its name with the configuration's settings, and by a function that makes the same."""
    options = {"lr": 2e-3, "weight_decay": 0.01, "no_decay": [], "clip_norm": 0.5}
    zero = {"level": 2, **AUTO}
    choice = for_matrices(name, "adamw") if name == "muon" else name

    def build(parameters: Any) -> torch.optim.Optimizer:
        return (
            torch.optim.Muon(parameters, lr=2e-3, weight_decay=0.01, eps=1e-8)
            if name == "muon"
            else adafactor(parameters)
        )

    def rest(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    function = for_matrices(build, rest) if name == "muon" else build
    return trained(choice, 2, zero=zero, optimizer=options)[1], trained(function, 2, zero=zero)[1]


@pytest.mark.parametrize("name", ["muon", "Adafactor"])
def test_optimizers_by_name(name: str) -> None:
    for by_name, by_function in run_ranks(2, named, name):
        assert same(by_name, by_function)


def owned(level: int, whole: list[str]) -> tuple[dict[str, int], dict[str, dict[str, tuple[int, ...]]], list[int], int]:
    """(bytes held, shapes of the state that this rank owns, bytes that ranks sent, bytes that should be more)."""
    engine, _ = trained(lamb if whole else tiny.adamw, 3, zero={"level": level, "whole_parameters": whole})
    state = engine._parts.optimizer.whole_state()
    owners: list[Any] = [None] * engine.world
    torch.distributed.all_gather_object(owners, list(state))
    moves = 0
    for shard in engine._parts.replica.shards:
        for rank, names in enumerate(owners):
            here = {piece.name: piece.numel for piece in shard.bucket.pieces(shard.bucket.shard(rank))}
            moves += sum(
                slot.numel - here.get(slot.name, 0)
                for slot in shard.bucket.slots
                if slot.name in names and slot.name != "unused"
            )
    shapes = {
        name: {key: tuple(value.shape) for key, value in one.items() if isinstance(value, Tensor)}
        for name, one in state.items()
    }
    held = {kind: values[engine.rank] for kind, values in engine.held_bytes().items()}
    return held, shapes, engine.sent_bytes()["dp"], 0 if level == 0 else 2 * 4 * moves


@pytest.mark.parametrize("level", range(4))
def test_state_is_whole_on_one_rank_and_what_moves_is_counted(level: int) -> None:
    results = run_ranks(3, owned, level, ["*"])
    usual = run_ranks(3, owned, level, [])
    infos = {name: tuple(p.shape) for name, p in odd().named_parameters() if p.requires_grad}
    sizes = []
    names: list[str] = []
    for held, shapes, sent, more in results:
        for name, state in shapes.items():
            # No backward reached it: it has no state.
            assert state == ({} if name == "unused" else {"mean": infos[name], "square": infos[name]})
        sizes.append(sum(numel(infos[name]) for name in shapes))
        names += shapes
        assert sum(sent) - sum(usual[0][2]) == pytest.approx(more, abs=3)  # a mean per step is rounded down
        if level:
            moments = 2 * 4 * sum(numel(infos[name]) for name in shapes if name != "unused")
            copies = held["optimizer"] - moments
            assert 0 < copies <= 4 * sizes[-1]
    assert sorted(names) == sorted(infos)
    assert max(sizes) - min(sizes) <= 3 * tiny.WIDTH * tiny.WIDTH  # the largest parameters are 4 times that
    share = sum(sizes) * 8 * 2 / 3
    assert level == 0 or 0.5 * share < results[0][3] <= 1.5 * share


def numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


class Clipped(torch.optim.SGD):
    """Row norms after a clip by the norm of all that it was given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 10.0)
        super().step()


def refusals() -> dict[str, str]:
    def text(choice: Any, whole: Any = (), **sections: Any) -> str:
        try:
            zero3d.Engine(odd(), tiny.loss, choice, {"zero": {"whole_parameters": list(whole)}, **sections})
        except zero3d.UsageError as error:
            return str(error)
        return ""

    return {
        "not whole": text(row_norm),
        "partly whole": text(row_norm, ["blocks.*"]),
        "muon": text(muon, ["auto"]),
        "coupled": text(lambda parameters: Clipped(parameters, lr=0.1), ["*"]),
        "pattern": text("adamw", ["block.*"]),
        "mapping's pattern": text({"block.*": muon, "*": "adamw"}, ["auto"]),
        "left over": text({"blocks.*": "adamw"}),
        "value": text({"*": 3}),
        "empty": text({}),
        "unheard": text({"*": row_norm}, ["auto"], optimizer={"lr": 0.1}),
        "drops": text(lambda parameters: torch.optim.SGD(list(parameters)[:1], lr=0.1)),
        "closure": text("lbfgs", ["*"]),
    }


EXPECTED = {
    "not whole": 'zero.whole_parameters = ["auto"]',
    "partly whole": "for places among others",
    "muon": "does not take parameter gain of shape []",
    "coupled": "depends on the others",
    "pattern": '"block.*"',
    "mapping's pattern": '"block.*"',
    "left over": "no optimizer is given for parameter places",
    "value": "int",
    "empty": "no optimizer is given",
    "unheard": "optimizer.lr is set",
    "drops": "left out parameter",
    "closure": "closure",
}


def test_c36_refusals_before_the_first_step_say_the_way_out() -> None:
    for found in run_ranks(2, refusals):
        for what, fragment in EXPECTED.items():
            assert fragment in found[what], (what, found[what])


def without_matrices() -> tuple[Trace, Trace]:
    """ "auto" where every optimizer is elementwise changes nothing."""
    return trained(tiny.adamw, 2, zero={"level": 2, **AUTO})[1], trained(tiny.adamw, 2, zero={"level": 2})[1]


def test_auto_leaves_elementwise_optimizers_on_shards() -> None:
    for one, other in run_ranks(2, without_matrices):
        assert same(one, other)


def scheduled() -> list[float]:
    """The learning rate that is reported follows the schedule on ranks that own nothing too."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    options = {
        "zero": {"level": 1, "whole_parameters": ["*"]},
        "optimizer": {"schedule": "linear", "warmup": 2},
        "run": {"steps": 4},
    }
    engine = zero3d.Engine(model, lambda out, batch: out.square().mean(), row_norm, options)
    return [engine.step(torch.ones(2, 8)).lr for _ in range(4)]


def test_every_rank_reports_the_learning_rate() -> None:
    for rates in run_ranks(2, scheduled):
        torch.testing.assert_close(rates, [1e-3, 2e-3, 2e-3, 1e-3])
