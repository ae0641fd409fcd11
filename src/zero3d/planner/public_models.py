"""The usual public models, as zero3d's own gpt and llama have their sizes. Pure.

What these leave out or have more of is a few parameters a block: GPT-2 and GPT-3 have biases and learned positions
where gpt has rotary ones; Qwen3 norms each head's queries and keys. Llama and Mistral are llama as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from zero3d.errors import UsageError

GPT2 = "Radford et al. 2019, table 2; huggingface.co/openai-community/gpt2*/config.json"
GPT3 = "Brown et al. 2020, table 2.1"
LLAMA2 = "Touvron et al. 2023, appendix A; huggingface.co/meta-llama/Llama-2-*/config.json"
LLAMA3 = "Grattafiori et al. 2024, table 3; huggingface.co/meta-llama/Llama-3*/config.json"
QWEN3 = "Yang et al. 2025, table 1; huggingface.co/Qwen/Qwen3-*/config.json"
MISTRAL = "Jiang et al. 2023, table 1; huggingface.co/mistralai/Mistral-7B-v0.1/config.json"


@dataclass(frozen=True, kw_only=True)
class PublicModel:
    """Keys of the same names are those of [model]. sequence: tokens that it was trained on at a time; source: where the
    sizes are from"""

    preset: str
    width: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    source: str
    kv_heads: int | None = None
    mlp_width: int | None = None
    tied: bool = False

    def section(self) -> dict[str, int | str | bool]:
        """[model] of a configuration."""
        found: dict[str, int | str | bool | None] = {
            "preset": self.preset,
            "width": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "mlp_width": self.mlp_width,
            "tied": self.tied,
        }
        return {key: value for key, value in found.items() if value is not None}


def _gpt(layers: int, width: int, heads: int, *, sequence: int = 1024, source: str = GPT2) -> PublicModel:
    return PublicModel(
        preset="gpt",
        width=width,
        layers=layers,
        heads=heads,
        vocabulary=50257,
        sequence=sequence,
        source=source,
        tied=True,
    )


def _llama(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    *,
    vocabulary: int,
    sequence: int,
    source: str,
    tied: bool = False,
) -> PublicModel:
    return PublicModel(
        preset="llama",
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        mlp_width=mlp_width,
        vocabulary=vocabulary,
        sequence=sequence,
        source=source,
        tied=tied,
    )


def _llama2(layers: int, width: int, heads: int, kv_heads: int, mlp_width: int) -> PublicModel:
    return _llama(layers, width, heads, kv_heads, mlp_width, vocabulary=32000, sequence=4096, source=LLAMA2)


def _llama3(layers: int, width: int, heads: int, kv_heads: int, mlp_width: int, *, tied: bool = False) -> PublicModel:
    return _llama(layers, width, heads, kv_heads, mlp_width, vocabulary=128256, sequence=8192, source=LLAMA3, tied=tied)


def _qwen3(layers: int, width: int, heads: int, kv_heads: int, mlp_width: int, *, tied: bool = False) -> PublicModel:
    return _llama(layers, width, heads, kv_heads, mlp_width, vocabulary=151936, sequence=4096, source=QWEN3, tied=tied)


PUBLIC: Mapping[str, PublicModel] = {
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-6.7b": _gpt(32, 4096, 32, sequence=2048, source=GPT3),
    "gpt3-175b": _gpt(96, 12288, 96, sequence=2048, source=GPT3),
    "llama2-7b": _llama2(32, 4096, 32, 32, 11008),
    "llama2-13b": _llama2(40, 5120, 40, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 8, 28672),
    "llama3-1b": _llama3(16, 2048, 32, 8, 8192, tied=True),
    "llama3-3b": _llama3(28, 3072, 24, 8, 8192, tied=True),
    "llama3-8b": _llama3(32, 4096, 32, 8, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 8, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 8, 53248),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, vocabulary=32000, sequence=8192, source=MISTRAL),
}


def find_model(name: str) -> PublicModel:
    """In any case, with or without "-" between name and number. Raises `UsageError` with the nearest names."""
    key = _plain(name)
    for known, model in PUBLIC.items():
        if _plain(known) == key:
            return model
    near = get_close_matches(name.lower(), PUBLIC, n=3, cutoff=0.4)
    raise UsageError(
        f"there is no model {name!r}",
        hint=(f"Did you mean {' or '.join(near)}? " if near else "")
        + f"Known: {', '.join(PUBLIC)}; or a folder with a config.json, a CONFIG (.toml), or module:function.",
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "-_ ").replace("llama3.1", "llama3")
