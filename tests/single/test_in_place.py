"""Gradients of linear layers' weights are computed where they are kept, in models in which that is not plain to see.

Close (1e-5): losses and weights of a plain loop that adds up the gradients of micro-batches. Every weight counts as
large here.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
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


class OldHook(Plain):
    """The kind of hook that is given, and gives, gradients of weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_backward_hook(lambda module, inner, outer: tuple(2 * one for one in inner))  # type: ignore[arg-type, misc]


class InPlaceAfterwards(Plain):
    def middle(self, x: Tensor) -> Tensor:
        return F.relu(self.second(input=x), inplace=True)


class HookedOutput(Plain):
    """A hook in front of all others gives another output."""

    def __init__(self) -> None:
        super().__init__()
        self.added = False

    def middle(self, x: Tensor) -> Tensor:
        if not self.added:  # With the first forward, and so after the engine's own.
            self.second.register_forward_hook(lambda module, args, output: output * 2, prepend=True)
            self.added = True
        return torch.tanh(self.second(x))


class Branching(Plain):
    """Looks at what its modules are."""

    def middle(self, x: Tensor) -> Tensor:
        scale = {self.first: 2.0, self.second: 0.5}
        x = torch.tanh(self.second(x)) * scale[self.second]
        return x if type(self.second) is nn.Linear else -x


class UsedAgainAtTimes(Plain):
    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x))
        return torch.tanh(self.second(y)) if float(x.detach().sum()) > 0 else y


class Sparse(Plain):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x) + self.second(x.detach().to_sparse()))


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
    OldHook,
    InPlaceAfterwards,
    HookedOutput,
    Branching,
    UsedAgainAtTimes,
    Sparse,
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


def test_modules_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones have a hook more, until the engine is closed; copies and pickles have one that does nothing."""
    monkeypatch.setattr(linears, "LARGE", WIDTH * WIDTH)
    model = made(Plain)
    engine = zero3d.Engine(model, loss, sgd, {"zero": {"level": 0}}, call=lambda model, batch: model(batch["x"]))
    engine.step(batches()[0])
    assert engine.model is model and {type(module) for module in model.children()} == {nn.Linear}
    assert [name for name, module in model.named_children() if module._forward_hooks] == ["first", "second"]
    x = torch.ones(2, WIDTH)
    for other in (copy.deepcopy(model.second), pickle.loads(pickle.dumps(model.second))):
        assert other(x).grad_fn.name() == "AddmmBackward0" and model.second(x).grad_fn.name() != "AddmmBackward0"
        assert torch.equal(other(x), model.second(x))
    engine.close()
    assert not any(module._forward_hooks for module in model.children())


def test_a_model_that_is_one_layer() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, 1, bias=False)
    options = {"parallel": {"micro_batch": MICRO_BATCH}}
    engine = zero3d.Engine(layer, loss, sgd, options, call=lambda model, batch: model(batch["x"]).squeeze(-1))
    with Seen() as seen:
        engine.step(batches()[0])
    assert len(seen.products) == SAMPLES / MICRO_BATCH


def test_a_forward_of_the_users_own_changes_nothing() -> None:
    """Beside a step, with gradients or transformed."""
    options = {"parallel": {"micro_batch": MICRO_BATCH}, "zero": {"level": 0}}
    engine = zero3d.Engine(made(Plain), loss, sgd, options, call=lambda model, batch: model(batch["x"]))
    engine.step(batches()[0])
    x = batches()[1]["x"]
    for _ in range(2):
        torch.autograd.grad(engine.model(x).sum(), list(engine.model.parameters()))
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(engine.model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent is not None
    with Seen() as seen:
        engine.step(batches()[0])
    assert len(seen.products) == 3 * SAMPLES / MICRO_BATCH
