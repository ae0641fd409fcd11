"""A Transformers model from its folder's config.json alone: no weights are needed to know what it will take."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zero3d.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Described:
    """How to build and call a causal language model. A batch has `tokens` [B, T]; the output has `logits`."""

    build: Callable[[], nn.Module]
    vocabulary: int
    config: Any

    def call(self, model: nn.Module, batch: Any) -> Any:
        return model(input_ids=batch["tokens"], use_cache=False)


def described(folder: Path, sequence_length: int | None = None) -> Described:
    """The causal language model that `folder`/config.json (or the file itself) describes.

    sequence_length: that it shall take. Raises `UsageError` for a folder without one, and what is missing in it.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            hint="Name a folder with the config.json of a Transformers model.",
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}", hint="Copy the model's config.json anew.") from None
    transformers = _transformers()
    kind = told.get("model_type") if isinstance(told, dict) else None
    known = sorted(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    if kind not in known:
        raise UsageError(
            f'{path} has "model_type": {json.dumps(kind)}, which Transformers {transformers.__version__} does not know',
            hint=_nearest(kind, known),
        )
    try:
        config = transformers.AutoConfig.for_model(**told)
        vocabulary = int(config.get_text_config().vocab_size)
        longest = getattr(config, "max_position_embeddings", None)
    except Exception as error:  # whatever the model's own configuration says of its fields
        raise UsageError(
            f"{path}: {type(error).__name__}: {_first_line(error)}", hint="See the model's own config.json."
        ) from None
    missing = [key for key in ("hidden_size", "num_hidden_layers", "vocab_size") if not _has(config, told, key)]
    if missing:
        raise UsageError(f"{path} does not say {', '.join(missing)}", hint="Copy the model's config.json anew.")
    if sequence_length is not None and longest is not None and sequence_length > longest:
        raise UsageError(
            f"{path} is for sequences of up to {longest:,} tokens, and data.sequence_length = {sequence_length:,}",
            hint=f"Set data.sequence_length={longest} or less.",
        )

    def build() -> nn.Module:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return model

    return Described(build=build, vocabulary=vocabulary, config=config)


def _has(config: Any, told: dict[str, Any], key: str) -> bool:
    """Whether the file says it, by this name or the one that the model's own configuration has for it."""
    names = {key, config.attribute_map.get(key, key)}
    inner = [value for value in told.values() if isinstance(value, dict)]
    return any(name in one for name in names for one in (told, *inner))


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError("Transformers is not installed", hint="pip install transformers") from None
    return transformers


def _nearest(kind: Any, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(str(kind), known, n=3)
    return f"Near names are {', '.join(near)}." if near else f"It knows {len(known)}, such as llama, gpt2 and qwen3."


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
