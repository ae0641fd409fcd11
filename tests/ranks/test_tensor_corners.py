"""Plans that do not tell the truth are found out when they first run, and what columns keep is kept for one forward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero3d
from tests.world import RankError, run_ranks

WIDTH, VOCABULARY, LENGTH = 32, 64, 8
SEPARATE = {"*.ask": "colwise", "*.key": "colwise", "*.value": "colwise", "*.back": "rowwise"}
FUSED = {"*.fused": "colwise", "*.back": "rowwise"}


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count, self.width = kind, 4, WIDTH
        if kind in ("chunk", "split"):
            self.fused = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.ask, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "chunk":
            q, k, v = self.fused(x).chunk(3, -1)
        elif self.kind == "split":
            q, k, v = self.fused(x).split(self.width, dim=-1)
        else:
            q, k, v = self.ask(x), self.key(x), self.value(x)
        heads = q.size(-1) // 8 if self.kind == "sizes" else self.count
        q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.back(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(kind)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def losses(kind: str, plan: dict[str, str], level: int, sequence: bool = False) -> list[float]:
    torch.manual_seed(0)
    tp = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    engine = zero3d.Engine(
        lambda: Net(kind),
        lambda logits, batch: zero3d.cross_entropy(logits, batch[:, 1:]),
        "adamw",
        {
            "parallel": {"tp": tp, "plan": plan if tp > 1 else {}, "sequence_parallel": sequence and tp > 1},
            "zero": {"level": level},
            "data": {"sequence_length": LENGTH},
        },
        call=lambda model, batch: model(batch[:, :-1]),
    )
    batch = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return [engine.step(batch).loss for _ in range(3)]


RIGHT: list[tuple[str, dict[str, str], int, bool]] = [
    ("sizes", SEPARATE, 0, False),
    ("sizes", {**SEPARATE, "norm": "sequence", "head": "vocab"}, 3, True),
    ("count", {**SEPARATE, "*.attention": "divide(count)"}, 3, False),
    ("chunk", {**FUSED, "*.fused": "qkv(4, 4)", "*.attention": "divide(count)"}, 2, False),
    ("split", {**FUSED, "*.fused": "qkv(4, 4)", "*.attention": "divide(count, width)"}, 0, False),
]


@pytest.mark.parametrize(("kind", "plan", "level", "sequence"), RIGHT)
def test_plans_that_fit_are_not_in_the_way(kind: str, plan: dict[str, str], level: int, sequence: bool) -> None:
    [plain] = run_ranks(1, losses, kind, {}, 0)
    for mine in run_ranks(2, losses, kind, plan, level, sequence):
        assert mine == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        ("count", SEPARATE, "blocks.0.attention gives other numbers"),
        ("chunk", {**FUSED, "*.attention": "divide(count)"}, "blocks.0.attention gives other numbers"),
        ("split", FUSED, r"blocks.0.attention \(Attention\) fails with the parts of its weights"),
    ],
)
def test_plans_that_would_change_numbers_are_refused(kind: str, plan: dict[str, str], said: str) -> None:
    with pytest.raises(RankError, match=said):
        run_ranks(2, losses, kind, plan, 0)


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)  # type: ignore[no-any-return]


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x)  # type: ignore[no-any-return]


class Latent(nn.Module):
    """Columns that take the same tensor in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.ones(LENGTH, WIDTH))
        self.a, self.b = Up(), Down()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.b(F.gelu(self.a(self.latent)))  # type: ignore[no-any-return]


def gradient_after_evaluate(evaluates: bool) -> Tensor:
    tp = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    plan = {"a.up": "colwise", "b.down": "rowwise", "embed": "vocab"} if tp > 1 else {}
    config = {"parallel": {"tp": tp, "plan": plan}}
    engine = zero3d.Engine(Latent, lambda y, batch: y.pow(2).mean(), config=config)
    batch = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if evaluates:
        engine.evaluate(batch)
    engine.step(batch)
    return engine.grad_of("latent")


def test_an_evaluation_leaves_nothing_to_the_next_step() -> None:
    [plain] = run_ranks(1, gradient_after_evaluate, False)
    for mine in run_ranks(2, gradient_after_evaluate, True):
        torch.testing.assert_close(mine, plain)


def strange_ids() -> str:
    plan = {"blocks.*.attention.ask": "colwise", "embed": "vocab"}
    engine = zero3d.Engine(
        lambda: Net("sizes"),
        lambda logits, batch: logits.mean(),
        config={"parallel": {"tp": 2, "plan": plan}},
    )
    with pytest.raises(IndexError) as error:
        engine.evaluate(torch.full((1, 4), VOCABULARY))
    return str(error.value)


def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    assert all("outside of 0 to 63" in text for text in run_ranks(2, strange_ids))
