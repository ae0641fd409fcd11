"""A small Llama: pre-norm blocks, RMSNorm, rotary positions, grouped KV heads, a gated MLP. Plain torch.

Shapes: B samples, T tokens, C width, H heads, K KV heads, D = C / H, M MLP width, V vocabulary.

Each block maps [B, T, C] to [B, T, C] and needs nothing else, and attention takes its numbers of heads from
the tensors that it meets: what cuts the model into stages or its matrices into slices changes no line here.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5
"""Added to the mean square in RMSNorm."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocabulary: int = 256
    sequence_length: int = 256
    """Longest input."""
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int | None = None
    """Heads of keys and values, each shared by heads / kv_heads heads; left out, as many as `heads`."""
    mlp_width: int | None = None
    """Left out, 8/3 of `width`, rounded up to a multiple of 64: as many weights as without a gate at 4 times."""
    dropout: float = 0.0
    """After embedding, attention and MLP."""
    tied: bool = False
    """The output layer uses the embedding's weight."""

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is no multiple of 2 * heads = {2 * self.heads}")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.num_kv_heads}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def inner_width(self) -> int:
        """Of the MLP."""
        return 64 * math.ceil(8 * self.width / (3 * 64)) if self.mlp_width is None else self.mlp_width

    @property
    def std(self) -> float:
        """Of all first weights: products of normed inputs start with variance 1."""
        return 1 / math.sqrt(self.width)

    @property
    def depth_scaled_std(self) -> float:
        """Of the weights that write to the residual stream, so that it grows as in a model of one layer."""
        return self.std / math.sqrt(2 * self.layers)


class Llama(nn.Module):
    """tokens [B, T] -> logits [B, T, V]. Its modules that have parameters, and the shapes of those:

    embedding                  tokens [B, T] -> [B, T, C]; weight [V, C], the head's too when tied
    blocks.*.attention_norm    RMSNorm; weight [C]
    blocks.*.attention.q       rows head by head; weight [H D, C]
    blocks.*.attention.k, v    rows KV head by KV head: head h uses number h // (H / K); weights [K D, C]
    blocks.*.attention.out     from the heads, in their order, to the residual stream; weight [C, H D]
    blocks.*.mlp_norm          RMSNorm; weight [C]
    blocks.*.mlp.gate, up      multiplied with each other row by row; weights [M, C]
    blocks.*.mlp.down          to the residual stream; weight [C, M]
    norm                       RMSNorm; weight [C]
    head                       [B, T, C] -> logits [B, T, V]; weight [V, C]
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.width, config.std)
        self.dropout = Dropout(config.dropout)
        rotary = Rotary(config.head_width, config.sequence_length)  # One for all blocks: its tables take memory.
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=EPS)
        self.head = Linear(config.width, config.vocabulary, config.std)
        if config.tied:
            self.head.weight = self.embedding.weight

    @property
    def tp_plan(self) -> dict[str, str]:
        """What tensor parallelism cuts, by patterns of paths."""
        return {
            "embedding": "vocab",
            "blocks.*.attention.q": "colwise",
            "blocks.*.attention.[kv]": "kv",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.gate": "colwise",
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
    def __init__(self, config: LlamaConfig, rotary: "Rotary") -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=EPS)
        self.attention = Attention(config, rotary)
        self.mlp_norm = nn.RMSNorm(config.width, eps=EPS)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention in which groups of heads share keys and values (Ainslie et al. 2023, section 2.2)."""

    def __init__(self, config: LlamaConfig, rotary: "Rotary") -> None:
        super().__init__()
        self.head_width = config.head_width
        self.q = Linear(config.width, config.heads * config.head_width, config.std)
        self.k = Linear(config.width, config.num_kv_heads * config.head_width, config.std)
        self.v = Linear(config.width, config.num_kv_heads * config.head_width, config.std)
        self.rotary = rotary
        self.out = Linear(config.heads * config.head_width, config.width, config.depth_scaled_std)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        grouped = q.size(1) != k.size(1)
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return out

    def _heads(self, projected: Tensor) -> Tensor:
        """[B, T, n D] -> [B, n, T, D]."""
        batch, length, _ = projected.shape
        return projected.view(batch, length, -1, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, section 2)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.inner_width, config.std)
        self.up = Linear(config.width, config.inner_width, config.std)
        self.down = Linear(config.inner_width, config.width, config.depth_scaled_std)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))
        return out


class Rotary(nn.Module):
    """Turns features i and i + D / 2 by an angle that grows with the position (Su et al. 2021, section 3.4)."""

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
        """[B, n, T, D] -> the same shape."""
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
