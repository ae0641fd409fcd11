"""A Transformers model from its folder's config.json alone: no weights are needed to know what it will take."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zero3d.errors import UsageError, one_line
from zero3d.models.presets import MOST_TOKEN_KINDS

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_local_experts",
    "num_experts_per_tok",
)
"""What each of which a model has is a positive integer."""
SHOWN = 40
"""Characters of a file in a message."""
CORRECT_IT = "Correct that in the file, or copy the model's config.json anew."


@dataclass(frozen=True, kw_only=True)
class Described:
    """How to build and call a causal language model. A batch has `tokens` [B, T]; the output has `logits`."""

    build: Callable[[], nn.Module]
    vocabulary: int
    longest: int | None
    """Tokens of a sample, where the model says it."""
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
    if not isinstance(told, dict):
        raise UsageError(
            f"{path} is no JSON object: {json.dumps(told)[:SHOWN]}", hint="Copy the model's config.json anew."
        )
    transformers = _transformers()
    kind = told.get("model_type")
    known = sorted(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    if kind not in known:
        raise UsageError(
            f"{path} has {_kind(kind)}, which Transformers {transformers.__version__} does not know"
            if "model_type" in told
            else f'{path} has no "model_type"',
            hint=_nearest(kind, known),
        )
    _refuse_others(path, kind, told.get("architectures"), transformers)
    try:
        config = transformers.AutoConfig.for_model(**told)
        text = config.get_text_config()
        vocabulary, longest = text.vocab_size, getattr(text, "max_position_embeddings", None)
    except Exception as error:  # whatever the model's own configuration says of its fields
        raise UsageError(f"{path}: {one_line(error)}", hint=CORRECT_IT) from None
    missing = [key for key in ("hidden_size", "num_hidden_layers", "vocab_size") if not any(_said(text, told, key))]
    if missing:
        raise UsageError(f"{path} does not say {', '.join(missing)}", hint="Copy the model's config.json anew.")
    _refuse_sizes(path, text, told)
    longest = longest if isinstance(longest, int) and longest > 0 else None
    if sequence_length is not None and longest is not None and sequence_length > longest:
        raise UsageError(
            f"{path} is for sequences of up to {longest:,} tokens, and data.sequence_length = {sequence_length:,}",
            hint=f"Set data.sequence_length={longest} or less.",
        )

    def build() -> nn.Module:
        try:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        except MemoryError:
            raise
        except Exception as error:  # whatever the model's own constructor says of its configuration
            raise UsageError(
                f"{path} describes no model that can be built: {one_line(error)}", hint=CORRECT_IT
            ) from error
        return model

    return Described(build=build, vocabulary=vocabulary, longest=longest, config=config)


def _refuse_others(path: Path, kind: Any, named: Any, transformers: Any) -> None:
    """Those that are no causal language models. named: "architectures", which need not be there."""
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if causal is None or (isinstance(named, list) and named and causal not in named):
        what = f'"architectures": {json.dumps(named)}' if named else _kind(kind)
        raise UsageError(
            f"{path} has {what}, which is no causal language model of Transformers {transformers.__version__}",
            hint="Only causal language models are built from a folder. Rehearse others with zero3d.rehearse from "
            'Python, or name a function that builds it: model.path = "module:function".',
        )


def _refuse_sizes(path: Path, config: Any, told: dict[str, Any]) -> None:
    """Those in the file that are no positive integers. Some have one a layer."""
    for key in SIZES:
        for name, value in _said(config, told, key):
            for size in value if isinstance(value, list) else [value]:
                if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                    raise UsageError(
                        f"{path} has {name} = {json.dumps(size)}, which must be an integer from 1 on", hint=CORRECT_IT
                    )
                if key == "vocab_size" and size > MOST_TOKEN_KINDS:
                    raise UsageError(f"{path} has {name} = {size:,}; {MOST_TOKEN_KINDS:,} is the most", hint=CORRECT_IT)


def _said(config: Any, told: dict[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """(name, value) where the file says it, by this name or the one that the model's own configuration has for it."""
    inner = [value for value in told.values() if isinstance(value, dict)]
    for name in sorted({key, config.attribute_map.get(key, key)}):
        yield from ((name, one[name]) for one in (told, *inner) if one.get(name) is not None)


def _kind(kind: Any) -> str:
    return f'"model_type": {json.dumps(kind)}'


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError("Transformers is not installed", hint="pip install transformers") from None
    return transformers


def _nearest(kind: Any, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(kind, known, n=3) if isinstance(kind, str) else []
    return f"Near names are {', '.join(near)}." if near else f"It knows {len(known)}, such as llama, gpt2 and qwen3."
