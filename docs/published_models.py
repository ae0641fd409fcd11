"""Models of the published runs that `make_planner_errors.py` predicts, as plain torch: their sizes and operations.

Shapes: B samples, T tokens, C width, H heads, D = C / H, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Sizes:
    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    fused: bool
    """Attention is one operation; else scores are made, and dropout is used, as in Megatron-LM of 2021."""


class GPT(nn.Module):
    """GPT-2's architecture: learned positions, biases, a tied output layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.sequence, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    @property
    def tp_plan(self) -> dict[str, str]:
        return {
            "embedding": "vocab",
            "blocks.*.qkv": f"colwise({3 * self.sizes.width // self.sizes.heads})",
            "blocks.*.out": "rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "norm": "sequence",
            "head": "vocab",
        }

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, bias = sizes.width, not sizes.fused
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropout(self.out(self._attention(self.qkv(self.attention_norm(x)))))
        return x + self._dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def _attention(self, qkv: Tensor) -> Tensor:
        batch, length, _ = qkv.shape
        width = self.sizes.width // self.sizes.heads
        q, k, v = qkv.view(batch, length, -1, 3, width).transpose(1, 2).unbind(3)  # each [B, H, T, D]
        if self.sizes.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # Scale, mask and softmax are one kernel there.
            y = self._dropout((q @ k.transpose(-2, -1)).softmax(-1)) @ v
        return y.transpose(1, 2).reshape(batch, length, -1)

    def _dropout(self, x: Tensor) -> Tensor:
        return x if self.sizes.fused else torch.native_dropout(x, 0.1, True)[0]
