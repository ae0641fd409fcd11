"""A user's module with values is rehearsed as one without them is, and stays as it was.

It was refused, as its parameters are real and all else on paper; and at level 3 it was left with released parameters.
"""

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
