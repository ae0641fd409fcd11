"""Models that know nothing of stages, cut into them unedited (C62): each beside a plain loop, and beside no stages.

Bit-equal: all ranks; and what pp = 1 gives, where no two stages have one parameter, clipping off. Close (1e-5): the
plain loop.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero3d
from tests import reference
from tests.pipeline_runs import Trace, adamw, assert_close, assert_same_bits
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

WIDTH, VOCABULARY, SAMPLES = 8, 31, 6
LENGTHS = [5, 7, 5, 3]
"""Of the texts, step by step."""


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Schicht(nn.Module):
    """A block of somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.hin, self.her = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, strom: Tensor, *, maske: Tensor, **rest: Any) -> Tensor:
        mixed = torch.where(maske, (strom @ strom.transpose(1, 2)), float("-inf")).softmax(-1) @ strom
        return strom + self.her(F.gelu(self.hin(mixed)))


class Odd(nn.Module):
    """Odd names, a mask made in forward, a parameter of the model's own on both sides of the blocks, **kwargs."""

    def __init__(self) -> None:
        super().__init__()
        self.wurzel = nn.Embedding(VOCABULARY, WIDTH)
        self.kraft = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.stamm = nn.ModuleDict({"ringe": nn.ModuleList(Schicht() for _ in range(4))})
        self.krone = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, **rest: Any) -> dict[str, Tensor]:
        x = self.wurzel(tokens) * self.kraft
        maske = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() & (tokens >= 0)[:, None]
        for ring in self.stamm["ringe"]:
            x = ring(x, maske=maske, **rest)
        return {"logits": self.krone(x * self.kraft)}


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = linear(), linear()

    def forward(self, x: Tensor, x0: Tensor, number: int) -> tuple[Tensor, Tensor, int]:
        x = x + torch.tanh(self.first(x) + self.again(x0)) / (number + 1)
        return x, x.square().mean(), number + 1


class Skips(nn.Module):
    """Every block uses the embedding's output too, and gives a side loss and an int; an output is added after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Mixing() for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)
        self.head, self.short = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = x0 = self.embed(tokens)
        side, number = x.new_zeros(()), 0
        for block in self.blocks:
            x, one, number = block(x, x0, number)
            side = side + one
        return self.head(self.norm(x)) * number + self.short(x0), side


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = linear(), linear()

    def forward(self, state: Mapping[str, Any]) -> dict[str, Any]:
        x, (a, b) = state["x"], state["pair"]
        a, b = torch.tanh(self.one(x) + b), torch.sigmoid(self.two(a))
        return {"x": x + a * b, "pair": [a, b], "nothing": None, "depth": state["depth"] + 1, "name": "packed"}


class Packs(nn.Module):
    """Blocks that take and give a dict with lists, None, an int and text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Packed() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        state = {"x": x, "pair": (x, x.detach()), "nothing": None, "depth": 0}
        for block in self.blocks:
            state = block(state)
            assert state["nothing"] is None and state["name"] == "packed"
        return self.head(state["x"] / state["depth"])  # type: ignore[no-any-return]


class Changes(nn.Module):
    """Blocks that change their input in place, which comes over a boundary; `between` them it is changed too."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = linear()

        def forward(self, x: Tensor) -> Tensor:
            x += torch.tanh(self.one(x.clone()))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Changes.Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def sequential() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(linear() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY))


def nested() -> nn.Module:
    layers = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(4)))
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), layers, nn.Linear(WIDTH, VOCABULARY))


def frozen(*names: str) -> nn.Module:
    """Skips, but for parameters whose names begin so."""
    model = Skips()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd names": Odd,
    "skips and side losses": Skips,
    "dicts": Packs,
    "in place": Changes,
    "nested Sequential": nested,
    "frozen front": partial(frozen, "embed", "blocks.0", "blocks.1", "blocks.2", "short"),
    "frozen middle": partial(frozen, "blocks.2", "blocks.3"),
    "frozen end": partial(frozen, "blocks.3", "blocks.4", "norm", "head", "short"),
    "flat Sequential": sequential,
}
BLOCKS = {"flat Sequential": ""}
PIPELINES: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "zbv", "stages_per_rank": 2},
]


def batches() -> list[dict[str, Tensor]]:
    generator, found = torch.Generator().manual_seed(3), []
    for length in LENGTHS:
        tokens = torch.randint(0, VOCABULARY, (SAMPLES + 1, length + 1), generator=generator)
        targets = tokens[:, 1:].masked_fill(torch.rand(SAMPLES + 1, length, generator=generator) < 0.2, -100)
        found.append({"tokens": tokens[:, :-1], "targets": targets})
    return found


def loss(output: Any, batch: Mapping[str, Tensor]) -> Any:
    logits, side = output if isinstance(output, tuple) else (output, 0.0)
    logits = logits["logits"] if isinstance(logits, Mapping) else logits
    total = F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), ignore_index=-100, reduction="sum")
    return total + side, int((batch["targets"] != -100).sum())


def call(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return model(batch["tokens"])


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def train(name: str, pp: int, level: int, pipeline: Mapping[str, Any]) -> Trace:
    parallel = {"pp": pp, "micro_batch": 2, **(pipeline if pp > 1 else {})}
    sections: dict[str, Any] = {"parallel": parallel, "zero": {"level": level, "reduce": "step"}}
    if name in BLOCKS:
        sections["model"] = {"blocks": BLOCKS[name]}
    model = made(name)
    keys = {key: value.shape for key, value in model.state_dict().items()}
    engine = zero3d.Engine(model, loss, adamw, sections, call=call)
    reports = [engine.step(batch) for batch in batches()]
    trainable = [one.name for one in engine.parameters if one.trainable]
    state = engine.full_state_dict()
    assert {key: value.shape for key, value in state.items()} == keys
    gradients = {one: engine.grad_of(one) for one in (trainable[0], trainable[-1])}
    engine.close()
    return Trace([one.loss for one in reports], [one.grad_norm for one in reports], state, gradients)


def train_all(runs: Sequence[tuple[Any, ...]]) -> list[Trace]:
    return [train(*run) for run in runs]


def plainly(name: str) -> reference.Trace:
    # Micro-batches as above: the side losses are sums of means.
    steps = [
        [{key: value[at : at + 2] for key, value in batch.items()} for at in range(0, 7, 2)] for batch in batches()
    ]
    return reference.train(made(name), loss, adamw, steps, call=call)


def compare(names: Sequence[str]) -> None:
    runs = [(name, 2, level, pipeline) for name in names for level, pipeline in zip((1, 3), PIPELINES)]
    ranks = run_ranks(2, train_all, runs, timeout=120)
    unstaged = run_ranks(1, train_all, [(name, 1, 1, {}) for name in names])[0]
    for number, (name, _, level, pipeline) in enumerate(runs):
        what = (name, level, pipeline)
        for found in ranks:
            assert_same_bits(found[number], ranks[0][number], what, norms=True)
        assert_close(ranks[0][number], run_ranks(1, plainly, name)[0], what)
        # What two stages use, such as a parameter of the model's own, is added up in another order.
        if name != "odd names":
            assert_same_bits(ranks[0][number], unstaged[names.index(name)], what)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_cut_as_they_are(name: str) -> None:
    """Texts of other lengths in every step, and a last micro-batch of one sample."""
    compare([name])
