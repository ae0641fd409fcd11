"""What models do between and around their blocks: stages give the numbers of one process, or say why they cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero3d
from tests.world import RankError, run_ranks

WIDTH, VOCABULARY, LENGTH = 16, 31, 8
PP = {"pp": 2, "micro_batch": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = self.between(number, block, x)
        return self.head(self.norm(x))

    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.place(torch.arange(tokens.size(1)))  # type: ignore[no-any-return]


class TiedInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding()
        self.head.weight = self.embed.token.weight


class TiedBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up.weight = self.blocks[0].up.weight


class Logged(Net):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        with torch.no_grad():
            x.norm().item()
        return x


class Scaled(Net):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.norm(dim=-1, keepdim=True)
        return block(x / size)  # type: ignore[no-any-return]


class Hooked(Net):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return x


class Random(Net):
    """Stochastic depth: what is drawn between blocks must be the same on both stages."""

    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        kept = (torch.rand(x.size(0), 1, 1) > 0.3).float() if self.training else 1.0
        return x + kept * (block(x) - x)


class Catching(Net):
    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        try:
            return block(x)  # type: ignore[no-any-return]
        except Exception as error:
            raise RuntimeError("a block failed") from error


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


class Buffered(Net):
    block = NormBlock


class AsideBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.aside = torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.aside = y.pow(2).mean()
        return y


class Aside(Net):
    block = AsideBlock

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens) * (1 + sum(block.aside for block in self.blocks))


class NumberBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), float(x.detach().abs().mean())


class Numbered(Net):
    block = NumberBlock

    def between(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        y, size = block(x)
        return y * (1 + size)  # type: ignore[no-any-return]


def train(build: Callable[[], nn.Module], parallel: dict[str, Any], level: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(0)
    engine = zero3d.Engine(
        build,
        lambda logits, batch: zero3d.cross_entropy(logits, batch[:, 1:]),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        {"parallel": {"micro_batch": 2, **parallel}, "zero": {"level": level}},
        call=lambda model, batch: model(batch[:, :-1]),
    )
    batches = torch.randint(0, VOCABULARY, (3, 4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    losses = [engine.step(batch).loss for batch in batches]
    with engine.gathered() as model:
        output = model(batches[0][:, :-1])
    return losses, engine.full_state_dict(), output


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize(
    "build", [TiedInside, TiedBlocks, Logged, Scaled, Hooked, Random, Catching, Buffered], ids=lambda one: one.__name__
)
def test_stages_give_the_numbers_of_one_process(build: type[nn.Module], level: int) -> None:
    [(losses, state, output)] = run_ranks(1, train, build, {})
    for mine in run_ranks(2, train, build, PP, level):
        assert mine[0] == pytest.approx(losses, rel=1e-5)
        assert mine[1].keys() == state.keys()
        for name, whole in state.items():
            torch.testing.assert_close(mine[1][name], whole, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(mine[2], output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("build", "said"), [(Aside, "reads blocks.0.aside"), (Numbered, "Give it as a tensor")])
def test_what_stays_on_its_stage_is_refused(build: type[nn.Module], said: str) -> None:
    with pytest.raises(RankError, match=said):
        run_ranks(2, train, build, PP)


def use_after_close(parallel: dict[str, Any]) -> list[str]:
    engine = zero3d.Engine(
        Net, lambda logits, batch: zero3d.cross_entropy(logits, batch), config={"parallel": parallel}
    )
    engine.close()
    texts = []
    for use in (
        lambda: engine.model(torch.zeros(1, 4, dtype=torch.long)),
        lambda: zero3d.Engine(engine.model, F.mse_loss),
    ):
        with pytest.raises(zero3d.UsageError) as error:
            use()
        texts.append(str(error.value))
    return texts


@pytest.mark.parametrize(
    "parallel", [{"pp": 2}, {"tp": 2, "plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}]
)
def test_a_closed_engines_model_in_parts_is_refused(parallel: dict[str, Any]) -> None:
    for used, again in run_ranks(2, use_after_close, parallel):
        assert "is closed" in used
        assert "sharded already" in again
