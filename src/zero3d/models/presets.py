"""From the section [model] of a configuration to the function that builds the module."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from zero3d.config import Model
from zero3d.errors import ConfigError
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.llama import Llama, LlamaConfig

Build = Callable[[], nn.Module]
MOST_TOKEN_KINDS = 1 << 31
IMPORT = "Mend what its import raises; python -c 'import MODULE' in the same folder shows where."


def build_function(model: Model, vocabulary: int, sequence_length: int, *, allow_code: bool = False) -> Build:
    """The function that builds `model` for `vocabulary` token kinds and inputs of `sequence_length` tokens.

    The sizes of a preset fit each other where `model` is from a `Config`, which checks them.

    A function named by `model.path` is called with those of the keyword arguments `vocabulary` and
    `sequence_length` that it has. Importing it runs code that the configuration names, which only
    `allow_code` permits. Raises `ConfigError`.
    """
    if vocabulary > MOST_TOKEN_KINDS:
        raise ConfigError(
            f"a vocabulary of {vocabulary:,} token kinds is too large; {MOST_TOKEN_KINDS:,} is the most",
            hint="Give the size of the tokenizer's vocabulary.",
        )
    if model.path is not None:
        if not allow_code:
            raise ConfigError(
                f"model.path = {model.path!r} runs code that the configuration names",
                hint="add --allow-code if you trust it",
            )
        return _from_path(model.path, {"vocabulary": vocabulary, "sequence_length": sequence_length})
    if model.preset not in PRESETS:
        raise ConfigError(f"there is no preset {model.preset!r}", hint=_presets_hint(model.preset))
    return PRESETS[model.preset](model, vocabulary, sequence_length)


def _gpt(model: Model, vocabulary: int, sequence_length: int) -> Build:
    config = GPTConfig(
        vocabulary=vocabulary,
        sequence_length=sequence_length,
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        dropout=model.dropout,
        tied=GPTConfig.tied if model.tied is None else model.tied,
    )
    return lambda: GPT(config)


def _llama(model: Model, vocabulary: int, sequence_length: int) -> Build:
    config = LlamaConfig(
        vocabulary=vocabulary,
        sequence_length=sequence_length,
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        mlp_width=model.mlp_width,
        dropout=model.dropout,
        tied=LlamaConfig.tied if model.tied is None else model.tied,
    )
    return lambda: Llama(config)


PRESETS: dict[str, Callable[[Model, int, int], Build]] = {"gpt": _gpt, "llama": _llama}


def _presets_hint(name: str | None) -> str:
    nearest = difflib.get_close_matches(name or "", PRESETS, n=1, cutoff=0.3)
    known = ", ".join(PRESETS)
    return f"did you mean {nearest[0]!r}? Known: {known}" if nearest else f"known: {known}"


def _from_path(path: str, arguments: dict[str, int]) -> Build:
    module_name, colon, function_name = path.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"model.path = {path!r} names no function", hint='write "package.module:function"')
    function: Any = _module(module_name, path)
    for part in function_name.split("."):
        if not hasattr(function, part):
            names = [name for name in vars(function) if not name.startswith("_")]
            nearest = difflib.get_close_matches(part, names, n=1)
            known = ", ".join(names[:8]) or "nothing"
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {known}"
            raise ConfigError(f"model.path = {path!r}: {module_name} has no {part!r}", hint=hint)
        function = getattr(function, part)
    if not callable(function):
        raise ConfigError(
            f"model.path = {path!r}: {function_name} is a {type(function).__name__}, no function",
            hint="Name a function, or a class, that returns an nn.Module.",
        )
    chosen = _accepted(function, arguments, path)

    def build() -> nn.Module:
        model = function(**chosen)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model.path = {path!r} returned {type(model).__name__}, no nn.Module",
                hint="Return the module from it.",
            )
        return model

    return build


def _module(name: str, path: str) -> Any:
    try:
        with _current_folder_importable():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            hint = "it is looked for in the current folder and on PYTHONPATH"
            missing = f"model.path = {path!r}: there is no module {error.name!r}"
            raise ConfigError(missing, hint=hint) from error
        raise ConfigError(f"model.path = {path!r}: {name} cannot be imported: {error}", hint=IMPORT) from error
    except Exception as error:
        reason = f"{name} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(f"model.path = {path!r}: {reason}", hint=IMPORT) from error


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    # An installed command does not look there, `python -m` does; both should find the same.
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _accepted(function: Callable[..., Any], arguments: dict[str, int], path: str) -> dict[str, int]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-in functions tell nothing
        return {}
    chosen = {name: value for name, value in arguments.items() if name in parameters}
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in parameters.items():
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in open_kinds
        if needed and name not in chosen:
            hint = f"it may take {' and '.join(arguments)}; give all else a default"
            raise ConfigError(f"model.path = {path!r}: the function needs {name!r}", hint=hint)
    return chosen
