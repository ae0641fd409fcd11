"""A user's module with values is rehearsed as one without them is, and stays as it was.

It was refused, as its parameters are real and all else on paper; and at level 3 it was left with released parameters.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zero3d


class Net(nn.Module):
    """With a tie, a frozen parameter and a buffer of integers that chooses rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 32)
        self.head.weight = self.blocks[0].weight
        self.blocks[1].bias.requires_grad_(False)
        self.register_buffer("rows", torch.tensor([3, 1]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)[:, self.rows]


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("world", [1, 8])
def test_a_module_is_rehearsed_as_a_function_is_and_stays_whole(level: int, world: int) -> None:
    torch.manual_seed(0)
    model, batch = Net(), torch.zeros(4, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        found = zero3d.rehearse(model, loss, "adamw", {"zero": {"level": level}}, batch=batch, world=world)
    expected = zero3d.rehearse(Net, loss, "adamw", {"zero": {"level": level}}, batch=batch, world=world)
    assert found.ranks[0].peak.by_kind == expected.ranks[0].peak.by_kind
    assert found.ranks[0].parameters == expected.ranks[0].parameters
    assert model.head.weight is model.blocks[0].weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model(torch.ones(4, 32)).isfinite().all()


class Recurrent(nn.Module):
    """Keeps a list of its parameters besides."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.layers = kind(8, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


class Counts(nn.Module):
    """With frozen parameters of integers: small ones, which have values in a rehearsal, and one that is large."""

    def __init__(self, numel: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(numel, dtype=torch.long), requires_grad=False)
        self.chosen = nn.Parameter(torch.ones(8, dtype=torch.bool), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.scale[:8] * self.chosen


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize(
    "build",
    [Recurrent, lambda: Recurrent(nn.GRU), Counts, lambda: Counts(1 << 13), lambda: Counts(1 << 20)],
    ids=["lstm", "gru", "integers", "more", "many"],
)
def test_modules_with_lists_and_integers_of_their_own(level: int, build: Callable[[], nn.Module]) -> None:
    """They trained, and their rehearsal said that its way hangs on values."""
    config, batch = {"zero": {"level": level}}, torch.zeros(4, 5, 8)
    module = zero3d.rehearse(build(), loss, "adamw", config, batch=batch, world=2).ranks[0]
    function = zero3d.rehearse(build, loss, "adamw", config, batch=batch, world=2).ranks[0]
    assert module.peak.by_kind == function.peak.by_kind
    assert module.parameters == function.parameters == sum(one.numel() for one in build().parameters())
