"""Models as people have them: each trains at every level as the plain loop trains it.

Close, 1e-5 in fp32, as the plain loop adds a whole batch at once; levels bit-equal among each other.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3d
from tests import reference
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

STEPS, RANKS, SAMPLES, WIDTH = 5, 2, 8, 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Input projection, blocks, output projection: the base of the models below."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(layers))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Tied(nn.Module):
    """Embedding and head share a weight; the head uses it as a function, outside any module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)
        self.enter = nn.Linear(5, 9)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.table(self.enter(x).argmax(-1)) + self.enter(x).tanh() @ self.table.weight
        for block in self.blocks:
            x = block(x)
        return self.leave(x) + F.linear(x, self.table.weight)[:, :3]


class TiedModules(Stack):
    """Two modules in different units register one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(5, WIDTH)
        self.again.weight = self.enter.weight

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return super().forward(x, kind) + self.again(x)[:, :3]


class Frozen(Stack):
    """Every second parameter is frozen, in blocks and outside."""

    def __init__(self) -> None:
        super().__init__()
        for number, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(number % 2 == 0)


class Twice(Stack):
    """Each block runs twice in one forward, and one of them a third time."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for block in [*self.blocks, *self.blocks, self.blocks[0]]:
            x = block(x)
        return self.leave(x)


class Unused(Stack):
    """A parameter that no forward uses, inside a block and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(4, 4)
        self.blocks[1].register_parameter("idle", nn.Parameter(torch.ones(7)))


class Branches(Stack):
    """Samples of kind 0 take one branch, of kind 1 the other: each rank has its own kind, and uses one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(WIDTH, 3)
        self.image = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.text(x) if int(kind[0]) == 0 else self.image(x)


class Sometimes(Stack):
    """A branch that no rank uses in every second step: its optimizer state must wait, as in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        y = super().forward(x, kind)
        return y if int(kind[0]) >= 2 else y + self.extra(self.enter(x))


class Odd(Stack):
    """0-dim, empty, one-element and odd-shaped parameters, and buffers that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1, 1, 1))
        self.odd = nn.Parameter(torch.linspace(-1, 1, 3 * 7 * 11).view(3, 7, 11))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x, kind) * self.scale * self.one[0, 0, 0]
        return y + self.odd.sum() * self.shift[:3] + self.empty.sum()


class Conv(nn.Module):
    """No list of blocks: convolutions, a channels-last weight, group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 6, 3, padding=1)
        self.second = nn.Conv1d(6, 5, 3).to(memory_format=torch.preserve_format)
        self.norm = nn.GroupNorm(1, 5)
        self.leave = nn.Linear(15, 3)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = torch.relu(self.first(x[:, None]))
        return self.leave(self.norm(self.second(x)).flatten(1))


class Checkpointed(Stack):
    """The user's own checkpointing of each block."""

    reentrant = False

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x)


class Reentrant(Checkpointed):
    """The older kind, with blocks run twice: a weight gets its gradient in several backwards inside one."""

    reentrant = True

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = super().forward(x, kind)
        y = self.enter(torch.cat([x, x[:, :2]], 1))
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=True)
        return x + self.leave(y)


class OneSegment(Stack):
    """The user's own checkpointing of all blocks at once."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.leave(checkpoint(self.middle, self.enter(x), use_reentrant=False))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Leaves(Stack):
    """Each block starts from a leaf, and computes on its weights: a leaf's gradient comes before theirs."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.up)  # type: ignore[arg-type]

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x.detach().requires_grad_())
        return self.leave(x)


class ReentrantMerged(Leaves):
    """Reentrant checkpointing makes leaves of every block's inputs."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.leave(x)


class Box:
    """An output that is neither a tensor nor a container."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxed(Layer):
    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class Boxes(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Boxed() for _ in range(3))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x).value
        return self.leave(x)


class Aside(Layer):
    """Returns nothing and leaves its result in a list."""

    def forward(self, x: Tensor, results: list[Tensor]) -> None:  # type: ignore[override]
        results.append(super().forward(x))


class Asides(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Aside() for _ in range(3))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        results = [self.enter(x)]
        for block in self.blocks:
            block(results[-1], results)
        return self.leave(results[-1])


class InPlace(Layer):
    """Writes into its input, which becomes its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(super().forward(x * 1.0))


class InPlaces(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace() for _ in range(3))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x) * 1.0
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Vmapped(Stack):
    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.func.vmap(lambda row, block=block: block(row))(x)
        return self.leave(x)


class Forces(Stack):
    """Differentiates inside the forward, and what comes of it once more in backward."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = super().forward(place, kind).square().sum()
            [force] = torch.autograd.grad(energy, place, create_graph=self.training)
        return super().forward(x, kind) + force[:, :3]


MODELS: list[Callable[[], nn.Module]] = [
    Leaves, ReentrantMerged, Boxes, Asides, InPlaces, Vmapped, Forces,
    Stack, Tied, TiedModules, Frozen, Twice, Unused, Branches, Sometimes, Odd, Conv, Checkpointed, Reentrant, OneSegment
]  # fmt: skip


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch["y"], reduction="sum"), batch["y"].numel()


def batches(kinds: Callable[[int, int], int]) -> list[list[dict[str, Tensor]]]:
    """[step][rank]; `kinds(step, rank)` is the kind of all its samples."""
    generator = torch.Generator().manual_seed(5)
    size = SAMPLES // RANKS
    return [
        [
            {
                "x": torch.randn(size, 5, generator=generator),
                "y": torch.randn(size, 3, generator=generator),
                "kind": torch.full((size,), kinds(step, rank)),
            }
            for rank in range(RANKS)
        ]
        for step in range(STEPS)
    ]


def kinds_of(make: Callable[[], nn.Module]) -> Callable[[int, int], int]:
    return (lambda step, rank: rank) if make is Branches else (lambda step, rank: 2 * (step % 2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def train(make: Callable[[], nn.Module], recompute: bool) -> dict[int, tuple[list[float], list[float], Any, Any]]:
    found = {}
    for level in range(4):
        options = {"zero": {"level": level, "reduce": "micro-batch"}, "parallel": {"micro_batch": 2}}
        if recompute:
            options["recompute"] = {"mode": "block"}
        engine = zero3d.Engine(build(make), loss, adamw, options)
        reports = [engine.step(step[engine.rank]) for step in batches(kinds_of(make))]
        gradients = {
            info.name: engine.grad_of(info.name) for info in engine.parameters if info.trainable and info.numel
        }
        found[level] = (
            [one.loss for one in reports],
            [one.grad_norm for one in reports],
            engine.full_state_dict(),
            gradients,
        )
    return found


def train_reference(make: Callable[[], nn.Module]) -> reference.Trace:
    steps = [
        [{key: value.split(2)[half] for key, value in part.items()} for part in step for half in range(2)]
        for step in batches(kinds_of(make))
    ]
    return reference.train(build(make), loss, adamw, steps, call=lambda model, batch: model(batch["x"], batch["kind"]))


# No blocks to recompute; and what torch's own checkpointing does not allow: inputs that are written to, and vmap.
NOT_RECOMPUTED = (Conv, InPlaces, Vmapped)
CASES = [(make, again) for make in MODELS for again in (False, True) if make not in NOT_RECOMPUTED or not again]


@pytest.mark.parametrize(
    ("make", "recompute"), CASES, ids=[f"{make.__name__}{'-recompute' * recompute}" for make, recompute in CASES]
)
def test_trains_as_the_plain_loop_at_every_level(make: Callable[[], nn.Module], recompute: bool) -> None:
    ranks = run_ranks(RANKS, train, make, recompute)
    [plain] = run_ranks(1, train_reference, make)
    for found in ranks:
        for level, (losses, norms, weights, gradients) in found.items():
            assert (losses, norms) == ranks[0][0][:2], level
            assert all(torch.equal(value, ranks[0][0][2][name]) for name, value in weights.items()), level
            torch.testing.assert_close(losses, plain.losses, rtol=1e-5, atol=0)
            torch.testing.assert_close(norms, plain.norms, rtol=1e-5, atol=0)
            assert weights.keys() == plain.weights.keys()
            for name, value in weights.items():
                if name == "calls":  # a count of forwards, which every rank makes of its own part
                    continue
                torch.testing.assert_close(value, plain.weights[name], rtol=1e-5, atol=2e-6, msg=f"{level} {name}")
            for name, value in gradients.items():
                expected = plain.gradients[name]
                expected = torch.zeros_like(value) if expected is None else expected
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=2e-6, msg=f"{level} gradient {name}")


def shares_one_object() -> list[bool]:
    """C27: both names of a tied weight are one object after wrapping, at every level."""
    found = []
    for level in range(4):
        engine = zero3d.Engine(build(TiedModules), loss, adamw, {"zero": {"level": level}})
        engine.step(batches(lambda step, rank: 0)[0][engine.rank])
        model = engine.model
        assert isinstance(model, TiedModules)
        state = engine.full_state_dict()
        found.append(
            model.again.weight is model.enter.weight and torch.equal(state["again.weight"], state["enter.weight"])
        )
    return found


def test_c27_ties_stay_ties() -> None:
    assert run_ranks(RANKS, shares_one_object) == [[True] * 4] * RANKS


def trains_a_copy() -> bool:
    model = build(Stack)
    twin = copy.deepcopy(model)
    engine = zero3d.Engine(model, loss, adamw, {"zero": {"level": 3}})
    engine.step(batches(lambda step, rank: 0)[0][engine.rank])
    return any(not torch.equal(value, engine.full_state_dict()[name]) for name, value in twin.state_dict().items())


def test_training_changes_weights() -> None:
    assert run_ranks(RANKS, trains_a_copy) == [True, True]
