"""TINY: the small model of most tests, its loss and batches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 32, 4, 16


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # a key bias has no gradient but rounding
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Tiny(nn.Module):
    """A GPT of 4 blocks, width 32, 4 heads, vocabulary 64, tied embedding."""

    def __init__(self, layers: int = 4, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tiny(seed: int = 0, **options: object) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(**options)  # type: ignore[arg-type]


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum, count) over targets that are not -100."""
    targets = batch["targets"]
    flat = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")
    return flat, (targets != -100).sum()


def batches(steps: int, samples: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Global batches; about a fifth of the targets are not counted."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        made.append({"tokens": tokens[:, :-1].contiguous(), "targets": targets})
    return made


def part(batch: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """One rank's part of a global batch."""
    return {key: value.chunk(ranks)[rank] for key, value in batch.items()}


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)  # type: ignore[arg-type]
