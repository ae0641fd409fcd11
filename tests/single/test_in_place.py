"""Gradients of linear layers' weights are computed where they are kept, in models in which that is not plain to see.

Close (1e-5): losses and weights of a plain loop that adds up the gradients of micro-batches. Every weight counts as
large here.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zero3d
from zero3d import linears

WIDTH, SAMPLES, MICRO_BATCH, STEPS = 8, 6, 2, 3
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "LARGE", 1)


class Plain(nn.Module):
    """Three layers; `middle` is what a test is about."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)))).squeeze(-1)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))


class Hooked(Plain):
    """The hook sees a micro-batch's gradient, and nothing that was added up before."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.register_hook(lambda gradient: 2 * gradient)


class HookedAfter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.second.weight.register_post_accumulate_grad_hook(self._saw)

    def _saw(self, _: Tensor) -> None:
        self.seen += 1


class UsedAgain(Plain):
    def middle(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.second(x))
        return x


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.second.weight

    def middle(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(x)))


class UsedByHand(Plain):
    """As a layer, and as a parameter."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) + x @ self.second.weight


class Penalized(Plain):
    """Its gradient has a gradient."""

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x))
        (slope,) = torch.autograd.grad(y.sum(), self.second.weight, create_graph=True)
        return y + slope.square().mean()


class _ByHand(torch.autograd.Function):
    """What a forward kept is computed again in backward, which asks for the weights' gradients itself and doubles
    them."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        weight, bias = ctx.layer.weight, ctx.layer.bias
        of_x, of_weight, of_bias = torch.autograd.grad(y, [x, weight, bias], outer)
        return None, of_x, 2 * of_weight, 2 * of_bias


class ByHand(Plain):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(_ByHand.apply(self.second, x, self.second.weight, self.second.bias))  # type: ignore[no-untyped-call]


class Reentrant(Plain):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(super().middle, x, use_reentrant=True)


class Checkpointed(Plain):
    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(super().middle, x, use_reentrant=False)


class Cast(Plain):
    def middle(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.tanh(self.second(x)).float()


class Mapped(Plain):
    def middle(self, x: Tensor) -> Tensor:
        return torch.vmap(super().middle)(x)


class SometimesIdle(Plain):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) if float(x.detach().sum()) > 0 else x


class Scalar(Plain):
    """One sample at a time, without a batch's dimension."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(self.second(one)) for one in x])


MODELS = (
    Plain,
    Hooked,
    HookedAfter,
    UsedAgain,
    Tied,
    UsedByHand,
    Penalized,
    ByHand,
    Reentrant,
    Checkpointed,
    Cast,
    Mapped,
    SometimesIdle,
    Scalar,
)


def loss(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch["y"], reduction="sum"), len(output)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(STEPS)]
    return [{"x": x, "y": x.sum(dim=1).sin()} for x in drawn]


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def plain_loop(model: nn.Module) -> list[float]:
    optimizer = sgd(model.parameters())
    losses = []
    for batch in batches():
        total = 0.0
        for start in range(0, SAMPLES, MICRO_BATCH):
            part = {name: one[start : start + MICRO_BATCH] for name, one in batch.items()}
            summed, _ = loss(model(part["x"]), part)
            (summed / SAMPLES).backward()
            total += float(summed.detach())
        losses.append(total / SAMPLES)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("reduce", ["step", "micro-batch"])
@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_trains_as_a_plain_loop(kind: type[Plain], level: int, reduce: str) -> None:
    options = {"zero": {"level": level, "reduce": reduce}, "parallel": {"micro_batch": MICRO_BATCH}}
    engine = zero3d.Engine(made(kind), loss, sgd, options, call=lambda model, batch: model(batch["x"]))
    losses = [engine.step(batch).loss for batch in batches()]
    model = made(kind)
    expected = plain_loop(model)
    most = 1e-2 if kind is Cast else 1e-5  # bf16 rounds sums and averages differently
    assert losses == pytest.approx(expected, rel=most)
    state = engine.full_state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=most, atol=most / 10)


class Seen(TorchDispatchMode):
    """The extents of what is copied or added into place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collected: list[int] = []
        self.products: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "foreach_copy" in name or "foreach_add" in name:
            self.collected += [one.numel() for one in args[0]]
        if name in ("aten.mm.out", "aten.addmm.out"):
            self.products.append(name)
        return func(*args, **(kwargs or {}))


def test_nothing_is_copied_or_added_but_small_ones() -> None:
    """Of every micro-batch: the three weights are products in place, the first micro-batch's written, others added."""
    options = {"zero": {"level": 0, "reduce": "step"}, "parallel": {"micro_batch": MICRO_BATCH}}
    engine = zero3d.Engine(made(Plain), loss, sgd, options, call=lambda model, batch: model(batch["x"]))
    with Seen() as seen:
        engine.step(batches()[0])
    assert seen.products == ["aten.mm.out"] * 3 + ["aten.addmm.out"] * 6
    assert set(seen.collected) == {WIDTH}  # biases


def test_small_weights_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "LARGE", WIDTH * WIDTH)
    model = made(Plain)
    engine = zero3d.Engine(model, loss, sgd, {}, call=lambda model, batch: model(batch["x"]))
    kinds = {name: type(module) for name, module in engine.model.named_children()}
    assert kinds["last"] is nn.Linear and issubclass(kinds["first"], nn.Linear) and kinds["first"] is not nn.Linear
    engine.close()
    assert {type(module) for module in engine.model.children()} == {nn.Linear}
