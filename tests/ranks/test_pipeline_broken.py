"""Models that stages once computed wrongly, or stopped at without a word: each has its story."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

import zero3d
from tests.ranks.test_pipeline_corners import LENGTH, VOCABULARY, WIDTH, Block, Net
from tests.world import run_ranks

STEPS = 3


class OwnParameters(Net):
    """The end of a stage leaves the model's own forward without its hooks: at level 3 the model's own parameters
    stayed gathered for ever, with the values of the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(self.norm(x + self.places))  # type: ignore[no-any-return]


class NormedBlock(Block):
    """A weight that is computed has a graph of its own, which two halves of a backward went through twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)


class Normed(Net):
    block = NormedBlock


@dataclass
class Output(ModelOutput):  # type: ignore[misc]
    last: Tensor | None = None
    more: Tensor | None = None
    size: Tensor | None = None


class OutputBlock(Block):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return Output(last=y, size=y.detach().abs().mean((1, 2), keepdim=True))


class Outputs(Net):
    """Later stages had plain dicts in the place of such outputs, without their attributes and numbers."""

    block = OutputBlock

    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        output = block(x)
        assert output.more is None
        return output[0] + output.last / (1 + output["size"] + output[1])  # type: ignore[no-any-return]


class NanBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), float("nan")


class Nan(Net):
    """NaN is not equal to itself, and was taken for a number that changes."""

    block = NanBlock

    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)[0]  # type: ignore[no-any-return]


class Skipping(Net):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return x if number == 1 and self.calls() > 1 else block(x)

    def calls(self) -> int:
        self.called = getattr(self, "called", 0) + 1
        return self.called


class Looped(Net):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        return self.blocks[0](x) if number == 3 else x  # type: ignore[no-any-return]


class Detached(Net):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        self.called = getattr(self, "called", 0) + (number == 0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and (number > 1 or self.called < 3)):
            return block(x)  # type: ignore[no-any-return]


class NumberedBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return {0: super().forward(x)}


class Numbered(Net):
    block = NumberedBlock

    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)[0]  # type: ignore[no-any-return]


def train(build: type[nn.Module], options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    config = {**options, "parallel": {"micro_batch": 2, **options.get("parallel", {})}}
    engine = zero3d.Engine(
        build(),
        lambda logits, batch: zero3d.cross_entropy(logits, batch[:, 1:]),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        config,
        call=lambda model, batch: model(batch[:, :-1]),
    )
    shape = (STEPS, 8, LENGTH + 1)
    batches = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    losses = [engine.step(batch.chunk(engine.dp_size)[engine.dp_index]).loss for batch in batches]
    with engine.gathered() as model:
        whole = {name: value.clone() for name, value in model.named_parameters() if name in ("places", "scale")}
    return losses, engine.full_state_dict(), whole


ZBV = {"parallel": {"pp": 2, "schedule": "zbv", "stages_per_rank": 2}}
LEVEL_3 = {"parallel": {"pp": 2, "dp": 2}, "zero": {"level": 3}}
WRONG = [
    (OwnParameters, LEVEL_3),
    (Normed, {"parallel": {"pp": 2, "schedule": "zbh1"}, "zero": {"level": 3}}),
    (Normed, ZBV),
    (Outputs, {"parallel": {"pp": 2}}),
    (Outputs, ZBV),
    (Nan, {"parallel": {"pp": 2}}),
]


@pytest.mark.parametrize(("build", "options"), WRONG)
def test_stages_give_the_numbers_of_one_process(build: type[nn.Module], options: dict[str, Any]) -> None:
    """Close: sums over ranks come in another order."""
    [(losses, state, _)] = run_ranks(1, train, build, {})
    for mine in run_ranks(2 * options["parallel"].get("dp", 1), train, build, options):
        assert mine[0] == pytest.approx(losses, rel=1e-5)
        for name, whole in state.items():
            torch.testing.assert_close(mine[1][name], whole, rtol=1e-5, atol=1e-6, msg=name)
        for name, gathered in mine[2].items():
            assert torch.equal(gathered, mine[1][name]), name


def refused(build: type[nn.Module]) -> str:
    try:
        train(build, {"parallel": {"pp": 2}})
    except zero3d.UsageError as error:
        return str(error)
    except zero3d.Zero3dError:
        return ""  # The other rank's.
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Skipping, "blocks.1 gave a tensor in the first micro-batch"),
        (Looped, "calls blocks.0 again"),
        (Detached, "without gradient"),
        (Numbered, "keys that are no texts"),
    ],
)
def test_what_cannot_be_cut_is_told_by_its_name(build: type[nn.Module], said: str) -> None:
    """The first was a bare KeyError, the second told to name a block in parallel.last_stage, the third showed the same
    shape twice, the fourth named dicts as what may be given."""
    assert said in "".join(run_ranks(2, refused, build, group_timeout=4))
