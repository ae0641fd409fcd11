"""Modules that nobody wrote with zero3d in mind: each trains at every level as the plain loop trains it.

Close, 1e-5 in fp32, as the plain loop adds the ranks' micro-batches in another order; levels bit-equal.
"""

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

import zero3d
from tests import reference
from tests.ranks.test_models import RANKS, SAMPLES, WIDTH, Layer, Stack, adamw, build, loss
from tests.world import run_ranks
from zero3d.trees import tensors_in

pytestmark = pytest.mark.ranks

STEPS = 3


class Picture(nn.Module):
    """Residual convolutions, group norm and pooling; channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.body = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(2)))
        self.leave = nn.Linear(16, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.norm(self.enter(x[:, None, :, None] * x[:, None, None, :]))
        x = F.max_pool2d(x + self.body(x), 2)
        return self.leave(F.adaptive_avg_pool2d(x, 2).flatten(1))


class Perceptron(nn.Sequential):
    """No list of blocks, and no forward of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 3))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return super().forward(x)


class Experts(nn.Module):
    """Top-1 routing; an expert without samples is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            if len(rows):
                mixed = mixed.index_add(0, rows, torch.tanh(expert(x[rows])) * weight[rows, None])
        return x + mixed


def blocks(make: Callable[[], nn.Module], layers: int = 3) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(layers))


class Mixture(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(Experts)


class LayerDrop(Stack):
    """Which blocks run is drawn in every step, the same on every rank."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        draws = torch.rand(3, generator=torch.Generator().manual_seed(int(kind[0])))
        for draw, block in zip(draws, self.blocks):
            x = block(x) if draw < 0.6 else x
        return self.leave(x)


class Shuffled(Stack):
    """Blocks run in another order in every step."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for number in range(3):
            x = self.blocks[(number + int(kind[0])) % 3](x)
        return self.leave(x)


class Group(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(Layer, 2)
        self.sides = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": blocks(Layer, 1)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, *self.sides["b"]]:
            x = layer(x) + self.sides["a"](x)
        return x


class Nested(Stack):
    """Blocks that hold lists of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(Group)


class Recurrent(Stack):
    """An LSTM outside, GRUs that return tuples as blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(1, WIDTH, batch_first=True)
        self.blocks = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=False) for _ in range(2))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        y, (hidden, _) = self.first(x[:, :, None])
        for block in self.blocks:
            y, hidden = block(y, hidden)
        return self.leave(y[:, -1]) + self.enter(x)[:, :3]


class Encoder(Stack):
    """torch's own transformer layers, which take a fast path in evaluation, and attention by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, WIDTH))
        self.blocks = blocks(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True), 2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)
        for block in self.blocks:  # of a key's bias nothing but rounding is ever its gradient
            block.self_attn.in_proj_bias.requires_grad_(False)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = x[:, :, None] * self.places
        for block in self.blocks:
            x = block(x)
        return self.leave(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Kept(Stack):
    """One block runs several times, and all that it gave is used at the end."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        found = [self.enter(x)]
        for block in [self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2], self.blocks[0]]:
            found.append(block(found[-1]))
        return self.leave(torch.stack(found).mul(torch.arange(1.0, 7.0)[:, None, None]).mean(0))


@dataclass(slots=True)
class Slots:
    value: Tensor
    note: str = ""


@dataclass(frozen=True)
class Frozen:
    value: Tensor
    more: tuple[Tensor, ...] = ()


class Pair(NamedTuple):
    value: Tensor
    other: Tensor | None


WRAPPERS: list[Callable[[Tensor], Any]] = [
    lambda x: {"value": x, "nothing": None},
    lambda x: (x, x.detach(), 3),
    lambda x: Slots(x),
    lambda x: Frozen(x.detach(), (x,)),
    lambda x: Pair(x, None),
    lambda x: [x, [x]],
]
OPENERS: list[Callable[[Any], Tensor]] = [
    lambda box: box["value"],
    lambda box: box[0],
    lambda box: box.value,
    lambda box: box.more[0],
    lambda box: box.value,
    lambda box: box[1][0],
]


class Wrapping(Layer):
    """Takes one kind of container by keyword and gives another."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, *, box: Any) -> Any:  # type: ignore[override]
        x = super().forward(OPENERS[self.number](box))
        return WRAPPERS[(self.number + 1) % len(WRAPPERS)](x)


class Containers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping(number) for number in range(len(WRAPPERS)))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        box = WRAPPERS[0](self.enter(x))
        for block in self.blocks:
            box = block(box=box)
        return self.leave(OPENERS[0](box))


class Borrowing(Stack):
    """The model uses the weights of its blocks, and every block those of a block that it is not the parent of."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(x) + F.linear(F.linear(x, block.up.weight).tanh(), self.blocks[number - 1].down.weight)
        return self.leave(x) + self.blocks[2].norm.bias[:3]


class Spectral(Stack):
    """Weights that are computed from parameters, by torch's two generations of tools."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.init.normal_(block.up.weight[:3], std=1.0)
            nn.utils.parametrizations.spectral_norm(block.up, n_power_iterations=40)
            nn.utils.parametrizations.weight_norm(block.down)
        nn.utils.parametrizations.orthogonal(self.enter)
        nn.utils.weight_norm(self.leave)


class SharedBlocks(Stack):
    """Blocks share a weight, and one block is twice in the list."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[2].norm = self.blocks[0].norm
        self.blocks.append(self.blocks[1])


class Segments(Layer):
    """A part of the block is checkpointed by its author, in either way."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(super().forward, x, use_reentrant=False)
        return x + checkpoint(self.part, x, use_reentrant=self.reentrant)

    reentrant = False

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.extra(x))


class ReentrantSegments(Segments):
    reentrant = True


class Inner(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(Segments)


class InnerReentrant(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(ReentrantSegments)


class Cube(torch.autograd.Function):
    """The user's own arithmetic, on a weight too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x**3 * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 3 * x**2 * weight * gradient, (x**3 * gradient).sum(0)


class Cubes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Cube.apply(torch.tanh(x), self.norm.weight))


class OwnFunction(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(Cubes)


class PartlyWithout(Stack):
    """The first blocks run without gradients, then with them, in one forward."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        with torch.no_grad():
            still = self.blocks[1](self.blocks[0](x))
        for block in self.blocks[1:]:
            x = block(x + still)
        return self.leave(x)


class Functional(Stack):
    """A block is called with other weights than its own, computed from its own."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            changed = {name: value * 1.5 for name, value in block.named_parameters()}
            x = block(x) + torch.func.functional_call(block, changed, (x,))
        return self.leave(x)


MODELS: list[Callable[[], nn.Module]] = [
    Picture, Perceptron, Mixture, LayerDrop, Shuffled, Nested, Recurrent, Encoder, Kept, Containers, Borrowing,
    Spectral, SharedBlocks, Inner, InnerReentrant, OwnFunction, PartlyWithout, Functional,
]  # fmt: skip
RECOMPUTED = [Mixture, LayerDrop, Kept, Containers, Inner, InnerReentrant]


def batches() -> list[list[dict[str, Tensor]]]:
    """[step][rank]; the kind of all samples is the step's number."""
    generator = torch.Generator().manual_seed(5)
    size = SAMPLES // RANKS
    return [
        [
            {
                "x": torch.randn(size, 5, generator=generator),
                "y": torch.randn(size, 3, generator=generator),
                "kind": torch.full((size,), step),
            }
            for _ in range(RANKS)
        ]
        for step in range(STEPS)
    ]


@dataclass
class Found:
    losses: list[float]
    evaluated: float
    weights: dict[str, Tensor]


def call(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["x"], batch["kind"])
    assert isinstance(output, Tensor)
    return output


def engine_of(model: nn.Module, level: int, loss: Any = loss, **options: Any) -> zero3d.Engine:
    config = {"zero": {"level": level, "reduce": "micro-batch"}, "parallel": {"micro_batch": 2}, **options}
    return zero3d.Engine(model, loss, adamw, config, call=call)


def train(make: Callable[[], nn.Module], **options: Any) -> list[Found]:
    """What each level makes of `make`."""
    found = []
    for level in range(4):
        engine = engine_of(build(make), level, **options)
        losses = [engine.step(step[engine.rank]).loss for step in batches()]
        evaluated = engine.evaluate(batches()[0][engine.rank]).loss
        found.append(Found(losses, evaluated, engine.full_state_dict()))
    return found


def train_plainly(make: Callable[[], nn.Module]) -> Found:
    steps = [
        [{key: value.split(2)[half] for key, value in part.items()} for part in step for half in range(2)]
        for step in batches()
    ]
    model = build(make)
    trace = reference.train(model, loss, adamw, steps, call=call)
    model.eval()
    with torch.no_grad():
        sums = [loss(call(model, part), part) for part in batches()[0]]
    return Found(trace.losses, sum(float(s) for s, _ in sums) / sum(n for _, n in sums), trace.weights)


def check(ranks: list[list[Found]], plain: Found) -> None:
    for levels in ranks:
        for level, found in enumerate(levels):
            first = ranks[0][0]
            assert found.losses == first.losses and found.evaluated == first.evaluated, level
            assert found.weights.keys() == plain.weights.keys()
            for name, value in found.weights.items():
                assert torch.equal(value, first.weights[name]), (level, name)
                torch.testing.assert_close(value, plain.weights[name], rtol=1e-5, atol=2e-6, msg=f"{level} {name}")
            torch.testing.assert_close(found.losses, plain.losses, rtol=1e-5, atol=0)
            assert found.evaluated == pytest.approx(plain.evaluated, rel=1e-5)


CASES = [(make, again) for make in MODELS for again in (False, True) if make in RECOMPUTED or not again]


@pytest.mark.parametrize(
    ("make", "recompute"), CASES, ids=[f"{make.__name__}{'-recompute' * recompute}" for make, recompute in CASES]
)
def test_trains_as_the_plain_loop_at_every_level(make: Callable[[], nn.Module], recompute: bool) -> None:
    options = {"recompute": {"mode": "block"}} if recompute else {}
    [plain] = run_ranks(1, train_plainly, make)
    check(run_ranks(RANKS, lambda: train(make, **options)), plain)


# LoRA.


def lora() -> nn.Module:
    options = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    model = peft.get_peft_model(Stack(), options)  # type: ignore[arg-type]
    model.merge_adapter()
    model.unmerge_adapter()
    return model


def lora_held() -> list[tuple[bool, dict[str, int]]]:
    """(the merged copy of the trained model computes as it does, what is held) at each level."""
    found = []
    for level in range(4):
        engine = engine_of(build(lora), level)
        [batch] = [step[engine.rank] for step in batches()[:1]]
        engine.step(batch)
        with engine.gathered() as model:
            merged = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
            same = torch.allclose(call(merged, batch), call(model, batch), rtol=1e-5, atol=1e-6)
        held = {kind: values[engine.rank] for kind, values in engine.held_bytes().items()}
        trained = sum(info.numel for info in engine.parameters if info.trainable)
        found.append((same and not any("lora" in name for name in merged.state_dict()), {**held, "trained": trained}))
    return found


def test_lora_trains_adapters_alone() -> None:
    [plain] = run_ranks(1, train_plainly, lora)
    ranks = run_ranks(RANKS, train, lora)
    check(ranks, plain)
    before = build(lora).state_dict()
    for name, value in ranks[0][0].weights.items():
        assert torch.equal(value, before[name]) == ("lora" not in name)
    for found in run_ranks(RANKS, lora_held):
        for level, (merges, held) in enumerate(found):
            assert merges
            # A bucket's padding is at most 64 elements a parameter and rank; the frozen base is nine times larger.
            held_at_most = 4 * (held["trained"] + 12 * 128) // (1 if level < 2 else RANKS)
            assert 0 < held["gradients"] <= held_at_most


# C72: torch.compile on each block, before zero3d sees the model.


class Backend:
    """Compiles nothing, and counts what it was asked to compile."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return lookup_backend("aot_eager")(graph, inputs)


def compiled(way: str, backend: Any) -> nn.Module:
    model = build(Stack)
    assert isinstance(model, Stack)
    if way == "model":
        model.compile(backend=backend)
    for number, block in enumerate(model.blocks):
        if way == "method":
            block.compile(backend=backend)
        elif way == "wrapper":
            model.blocks[number] = torch.compile(block, backend=backend)  # type: ignore[assignment]
    return model


SETTINGS = [(1, False), (2, False), (3, False), (3, True)]
"""(level, whether blocks are recomputed)"""


def train_compiled() -> list[tuple[str, list[float], list[int], dict[str, Tensor]]]:
    """The method compiles a block with its hooks, the wrapper without them; the model is compiled with its own."""
    torch._dynamo.reset()
    found = []
    backends = {way: Backend() for way in ("method", "wrapper", "model")}
    blockwise = [(way, level, again) for way in ("method", "wrapper") for level, again in SETTINGS]
    for way, level, again in [*blockwise, ("model", 3, False)]:
        options: dict[str, Any] = {"recompute": {"mode": "block"}} if again else {}
        engine = engine_of(compiled(way, backends[way]), level, **options)
        losses, counts = [], []
        for step in (batches() * 4)[:10]:
            losses.append(engine.step(step[engine.rank]).loss)
            counts.append(backends[way].count)
        found.append((way, losses, counts, engine.full_state_dict()))
    return found


def train_eagerly() -> reference.Trace:
    steps = [
        [{key: value.split(2)[half] for key, value in part.items()} for part in step for half in range(2)]
        for step in (batches() * 4)[:10]
    ]
    return reference.train(build(Stack), loss, adamw, steps, call=call)


def test_c72_compiled_blocks() -> None:
    [plain] = run_ranks(1, train_eagerly)
    for found in run_ranks(RANKS, train_compiled):
        for way, losses, counts, weights in found:
            # Blocks of one code are one graph, at every level: our hooks stay outside of it.
            assert counts == [counts[0]] * 10
            assert counts[0] == 1 or way == "model"
            assert losses == found[0][1]
            torch.testing.assert_close(losses, plain.losses, rtol=1e-5, atol=0)
            renamed = {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
            assert (renamed.keys() != weights.keys()) == (way == "wrapper")
            for name, value in renamed.items():
                torch.testing.assert_close(value, plain.weights[name], rtol=1e-5, atol=2e-6)


# The user's own hooks.


def attach(model: Any, log: list[tuple[str, float]]) -> None:
    """Every kind of hook, each of which looks at a weight where torch lets it."""

    def say(what: str, *tensors: Tensor) -> None:
        log.extend((what, float(tensor.detach().sum())) for tensor in tensors)

    for block in model.blocks:
        block.register_forward_pre_hook(lambda m, args: say("forward pre", m.up.weight))
        block.register_forward_hook(lambda m, args, output: say("forward", m.down.weight, output))
        block.register_full_backward_pre_hook(lambda m, outs: say("backward pre", outs[0], m.up.weight))
        block.register_full_backward_hook(lambda m, ins, outs: say("backward", ins[0], outs[0], m.up.weight))
        block.down.register_full_backward_hook(lambda m, ins, outs: say("inner backward", ins[0], m.weight))
        block.up.weight.register_hook(lambda gradient: say("gradient", gradient))
        block.up.weight.register_post_accumulate_grad_hook(lambda p: say("accumulated", p.grad, p))
    model.enter.register_forward_hook(lambda m, args, output: output.register_hook(lambda g: say("output", g)) and None)


def hooked() -> list[list[tuple[str, float]]]:
    found = []
    for level in range(4):
        log: list[tuple[str, float]] = []
        model = build(Stack)
        attach(model, log)
        engine = engine_of(model, level)
        engine.step(batches()[0][engine.rank])
        found.append(log)
    return found


def hooked_plainly(rank: int) -> list[tuple[str, float]]:
    log: list[tuple[str, float]] = []
    model = build(Stack)
    attach(model, log)
    for half in range(2):
        batch = {key: value.split(2)[half] for key, value in batches()[0][rank].items()}
        model.zero_grad()
        loss(call(model, batch), batch)[0].backward()
    return log


def test_the_users_hooks_run_and_see_weights_and_gradients() -> None:
    for rank, found in enumerate(run_ranks(RANKS, hooked)):
        [plain] = run_ranks(1, hooked_plainly, rank)
        assert len({what for what, _ in plain}) == 8
        for log in found:
            assert log == plain


# Losses that use more than the model's output.


def again_in_loss(model: nn.Module, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The model once more, with another bias."""
    other = torch.func.functional_call(model, {"leave.bias": torch.ones(3)}, (batch["x"], batch["kind"]))
    total, count = loss(output, batch)
    return total + (other - output).square().sum() / 10, count


def teacher_in_loss(model: nn.Module, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A teacher that was copied from the model before it was handed over."""
    with torch.no_grad():
        target = call(model, batch)
    total, count = loss(output, batch)
    return total + F.mse_loss(output, target, reduction="sum"), count


def prepared(which: str) -> tuple[nn.Module, nn.Module, Any]:
    """(model, the teacher that follows it or itself, loss)."""
    model = build(Stack)
    other = copy.deepcopy(model).requires_grad_(False) if which == "teacher" else model
    term = teacher_in_loss if which == "teacher" else again_in_loss
    return model, other, lambda output, batch: term(other, output, batch)


def train_with_loss(which: str) -> list[tuple[list[float], dict[str, Tensor], bool]]:
    found = []
    for level in range(4):
        model, other, term = prepared(which)
        engine = engine_of(model, level, term)
        losses = []
        for step in batches():
            losses.append(engine.step(step[engine.rank]).loss)
            if which == "teacher":
                with engine.gathered() as whole:
                    for mine, new in zip(other.parameters(), whole.parameters()):
                        mine.lerp_(new, 0.1)
        with engine.gathered() as whole:
            twin = copy.deepcopy(whole)
        state = engine.full_state_dict()
        apart = all(torch.equal(value, state[name]) for name, value in twin.state_dict().items())
        call(twin, batches()[0][0]).sum().backward()  # the copy is a plain module: it trains by itself
        with torch.no_grad():
            for parameter in twin.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad + 1)
        again = engine.full_state_dict()
        apart &= all(torch.equal(value, again[name]) for name, value in state.items())
        found.append((losses, state, apart))
    return found


def train_with_loss_plainly(which: str) -> tuple[list[float], dict[str, Tensor]]:
    model, other, term = prepared(which)
    optimizer = adamw(model.parameters())
    losses = []
    for step in batches():
        optimizer.zero_grad()
        sums = [term(call(model, part), part) for part in step]
        mean = torch.stack([total for total, _ in sums]).sum() / sum(count for _, count in sums)
        mean.backward()
        optimizer.step()
        losses.append(float(mean.detach()))
        if which == "teacher":
            with torch.no_grad():
                for mine, new in zip(other.parameters(), model.parameters()):
                    mine.lerp_(new, 0.1)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("which", ["teacher", "functional_call"])
def test_losses_that_run_a_model_and_copies_of_it(which: str) -> None:
    [(expected, weights)] = run_ranks(1, train_with_loss_plainly, which)
    ranks = run_ranks(RANKS, train_with_loss, which)
    for found in ranks:
        for losses, state, apart in found:
            assert apart
            assert losses == ranks[0][0][0]
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
            for name, value in state.items():
                assert torch.equal(value, ranks[0][0][1][name])
                torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=2e-6)


def penalised(level: int) -> tuple[float, str]:
    model: Any = build(Stack)

    def penalty(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        total, count = loss(output, batch)
        return total + model.blocks[1].up.weight.square().sum(), count

    engine = engine_of(model, level, penalty)
    try:
        return engine.step(batches()[0][engine.rank]).loss, ""
    except zero3d.ReleasedParameterError as error:
        return 0.0, str(error)


def test_a_loss_that_reads_weights_works_or_says_where_to_compute_it() -> None:
    for level in range(4):
        for value, text in run_ranks(RANKS, penalised, level):
            if level < 3:
                assert value > 1
            else:
                assert "blocks.1.up.weight is released" in text
                assert "term of the loss that needs it is computed in the model's forward" in text


# C32: buffers of a model that was made without memory.


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(6.0), 1 / 100 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.blocks = blocks(lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), 2)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x[:, :3] * self.cos[: len(x), :1]


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Rotary()


def buffers() -> list[tuple[dict[str, Tensor], bool, bool]]:
    """(buffers after wrapping, all parameters are real and finite, it trains) at each level."""
    found = []
    for level in range(4):
        engine = engine_of(on_meta, level)  # type: ignore[arg-type]
        first = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
        state = engine.full_state_dict()
        trains = engine.step(batches()[0][engine.rank]).loss > 0
        found.append((first, all(bool(value.isfinite().all()) for value in state.values()), trains))
    return found


def test_c32_buffers_of_a_meta_model_are_those_of_the_eager_one() -> None:
    torch.manual_seed(0)
    expected = dict(Rotary().named_buffers())
    for found in run_ranks(RANKS, buffers):
        for first, finite, trains in found:
            assert finite and trains
            assert first.keys() == expected.keys() and "cos" in first
            assert all(torch.equal(value, expected[name]) for name, value in first.items())


# Batches of every make.


class Plain:
    """Neither a container nor a dataclass."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.itself = self
        self.note = "kept"


@dataclass(frozen=True)
class Derived:
    value: Tensor
    length: int = field(init=False, default=3)


BATCHES: list[Callable[[Tensor], Any]] = [
    *WRAPPERS[:1], *WRAPPERS[2:], Plain, Derived, lambda x: UserDict(value=x), lambda x: (x, {"y": x}),
]  # fmt: skip


class Takes(nn.Module):
    """Finds the samples in its input, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, batch: Any) -> Tensor:
        return self.layer(first_of(batch))


def first_of(batch: Any) -> Tensor:
    return next(tensors_in(batch))


def of_every_make() -> list[list[float]]:
    """Losses of two micro-batches and of one, for each kind of batch."""
    found = []
    for make in BATCHES:
        batch = make(batches()[0][torch.distributed.get_rank()]["x"])
        kind, losses = type(batch), []
        for size in (2, None):

            def summed(output: Tensor, part: Any, kind: type = kind) -> tuple[Tensor, int]:
                assert type(part) is kind and len(output) == len(first_of(part))
                return output.square().sum(), len(output)

            parallel = {} if size is None else {"micro_batch": size}
            engine = zero3d.Engine(
                build(Takes), summed, adamw, {"zero": {"level": 3}, "parallel": parallel}, call=lambda m, b: m(b)
            )
            report = engine.step(batch)
            assert report.tokens == SAMPLES
            losses.append(report.loss)
        found.append(losses)
    return found


def test_batches_of_every_make_are_cut_into_micro_batches() -> None:
    for found in run_ranks(RANKS, of_every_make):
        for losses in found:
            assert losses == pytest.approx([found[0][0]] * 2, rel=1e-6)
