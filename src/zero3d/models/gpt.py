"""A small GPT: pre-norm blocks, rotary positions, a tied output layer. Plain torch.

Shapes: B samples, T tokens, C width, H heads, D = C / H, V vocabulary.

Each block maps [B, T, C] to [B, T, C] and needs nothing else, and attention takes its number of heads from
the tensors that it meets: what cuts the model into stages or its matrices into slices changes no line here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocabulary: int = 256
    sequence_length: int = 256
    """Longest input."""
    width: int = 256
    layers: int = 6
    heads: int = 4
    dropout: float = 0.0
    """After embedding, attention and MLP."""
    tied: bool = True
    """The output layer uses the embedding's weight."""

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is no multiple of 2 * heads = {2 * self.heads}")

    @property
    def std(self) -> float:
        """Of all first weights: products of normed inputs start with variance 1, tied logits as well.

        For a width of 2500 it is the usual 0.02; small models learn much faster than with that.
        """
        return 1 / math.sqrt(self.width)

    @property
    def depth_scaled_std(self) -> float:
        """Of the weights that write to the residual stream, so that it grows as in a model of one layer."""
        return self.std / math.sqrt(2 * self.layers)


class GPT(nn.Module):
    """tokens [B, T] -> logits [B, T, V]. Its modules that have parameters, and the shapes of those:

    embedding                  tokens [B, T] -> [B, T, C]; weight [V, C], the head's too when tied
    blocks.*.attention_norm    LayerNorm; weight [C]
    blocks.*.attention.qkv     rows head by head, of each q, k and v; weight [3 C, C]
    blocks.*.attention.out     from the heads, in the same order, to the residual stream; weight [C, C]
    blocks.*.mlp_norm          LayerNorm; weight [C]
    blocks.*.mlp.up            weight [4 C, C]
    blocks.*.mlp.down          to the residual stream; weight [C, 4 C]
    norm                       LayerNorm; weight [C]
    head                       [B, T, C] -> logits [B, T, V]; weight [V, C]
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width, config.std)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = Linear(config.width, config.vocabulary, config.std)
        if config.tied:
            self.head.weight = self.embedding.weight

    @property
    def tp_plan(self) -> dict[str, str]:
        """What tensor parallelism cuts, by patterns of paths."""
        return {
            "embedding": "vocab",
            "blocks.*.attention.qkv": f"colwise({3 * self.config.width // self.config.heads})",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "norm": "sequence",
            "head": "vocab",
        }

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention. Rows of `qkv` are ordered head by head, q, k and v of a head together."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.qkv = Linear(config.width, 3 * config.width, config.std)
        self.rotary = Rotary(self.head_width, config.sequence_length)
        self.out = Linear(config.width, config.width, config.depth_scaled_std)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        batch, length, _ = qkv.shape
        q, k, v = qkv.view(batch, length, -1, 3, self.head_width).transpose(1, 2).unbind(3)  # each [B, H, T, D]
        # Attention keeps v for backward. As a view it would keep q and k before their rotation as well.
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v.contiguous(), is_causal=True)
        out: Tensor = self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, -1)))
        return out


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, 4 * config.width, config.std)
        self.down = Linear(4 * config.width, config.width, config.depth_scaled_std)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))
        return out


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position (Su et al. 2021, section 3.4)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, sequence_length: int) -> None:
        super().__init__()
        for name in ("cos", "sin"):
            table = torch.empty(sequence_length, head_width // 2)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        length, pairs = self.cos.shape
        device = self.cos.device
        speeds = 10_000.0 ** (-torch.arange(pairs, dtype=torch.float32, device=device) / pairs)
        angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), speeds)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> the same shape."""
        length = x.size(-2)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Dropout(nn.Dropout):
    """Keeps one byte an element for backward; torch's own keeps the whole factor on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.training and self.p else x


class Linear(nn.Linear):
    """Without bias; weights from a normal distribution of standard deviation `std`."""

    def __init__(self, features_in: int, features_out: int, std: float) -> None:
        self.std = std  # before the constructor, which calls reset_parameters
        super().__init__(features_in, features_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """Weights from a normal distribution of standard deviation `std`."""

    def __init__(self, vocabulary: int, width: int, std: float) -> None:
        self.std = std  # before the constructor, which calls reset_parameters
        super().__init__(vocabulary, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    tokens: Tensor,
    count: int,
    *,
    sequence_length: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`tokens` [B, T] and `count` more [B, T + count], each drawn from softmax(logits / temperature).

    `model` is anything from tokens [B, t <= sequence_length] to logits [B, t, V]; it sees the last
    `sequence_length` tokens. Temperature 0 takes the likeliest token.
    """
    for _ in range(count):
        logits = model(tokens[:, -sequence_length:])[:, -1].float()
        if temperature == 0:
            drawn = logits.argmax(-1, keepdim=True)
        else:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, drawn), dim=1)
    return tokens
