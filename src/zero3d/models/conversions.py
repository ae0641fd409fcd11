"""What the tensors of a file are called in a model that Transformers builds, and how they are put together there.

Transformers writes some models in another form than it holds them: names with or without the base model's prefix,
names of older versions, experts one by one that are one tensor in memory. Its own tables say which (transformers 5);
under older versions, and for models of other makers, names are those of the model, up to the prefix.
"""

import copy
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from zero3d.models.weight_files import WeightFiles

Read = Callable[[], Tensor]

NO_LONGER_KEPT = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older files have and newer models compute."""


def readers(model: nn.Module, known: Mapping[str, Tensor], files: WeightFiles) -> tuple[dict[str, Read], list[str]]:
    """(name in the model -> how to read its values, names in the files that fit nothing); `known`: the model's state,
    without values."""
    tables = _tables(model, known)
    return _by_name(model, known, files) if tables is None else tables.readers(files)


def may_be_missing(model: nn.Module, name: str) -> bool:
    """Whether files of such models often lack the tensor, as the model says itself."""
    return _matches(name, getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def may_be_left_over(model: nn.Module, name: str) -> bool:
    """Whether files often have a tensor `name` that the model does without."""
    computed = [buffer for buffer, _ in model.named_buffers()]
    patterns = (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *NO_LONGER_KEPT)
    return _matches(name, patterns) or any(found in computed for found in _variants(model, name))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _variants(model: nn.Module, name: str) -> Iterator[str]:
    """The name; with the prefix of a base model; without it."""
    yield name
    prefix = str(getattr(model, "base_model_prefix", ""))
    if prefix:
        yield f"{prefix}.{name}"
        if name.startswith(f"{prefix}."):
            yield name.removeprefix(f"{prefix}.")


def _by_name(model: nn.Module, known: Mapping[str, Tensor], files: WeightFiles) -> tuple[dict[str, Read], list[str]]:
    found: dict[str, Read] = {}
    left: list[str] = []
    for key in files.names:
        name = next((name for name in _variants(model, key) if name in known), None)
        if name is None:
            left.append(key)
        else:
            found[name] = partial(files.read, key)
    return found, left


def _tables(model: nn.Module, known: Mapping[str, Tensor]) -> "_Tables | None":
    if not any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__):
        return None
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
    except ImportError:
        return None
    return _Tables(model, known, loading, mapping.get_model_conversion_mapping(model))


class _Tables:
    """Transformers' own rules for one model: renamings, of which all apply, and converters, of which one does."""

    def __init__(self, model: Any, known: Mapping[str, Tensor], loading: Any, rules: Sequence[Any]) -> None:
        self._model = model
        self._known = known
        self._loading = loading
        self._renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]

    def readers(self, files: WeightFiles) -> tuple[dict[str, Read], list[str]]:
        by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        found: dict[str, Read] = {}
        left: list[str] = []
        sources: dict[str, list[tuple[str, str]]] = {}
        for key in sorted(files.names, key=self._loading.dot_natural_key):
            name, pattern = self._name_of(key)
            if name not in self._known:
                left.append(key)
            elif pattern is None:
                found[name] = partial(files.read, key)
            else:
                sources.setdefault(name, []).append((pattern, key))
        for first, keys in sources.items():
            converter = by_pattern[keys[0][0]]
            for name in _targets(converter, first):
                found[name] = partial(self._converted, converter, first, name, keys, files)
        return found, left

    def _name_of(self, key: str) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        rename = self._loading.rename_source_key
        name, pattern = rename(key, self._renamings, self._converters, prefix, self._known)
        if name not in self._known and key in self._known:
            name, pattern = rename(key, [], [], prefix, self._known)
        return name, pattern

    def _converted(
        self, converter: Any, first: str, name: str, keys: Sequence[tuple[str, str]], files: WeightFiles
    ) -> Tensor:
        mine = copy.deepcopy(converter)
        for pattern, key in keys:
            mine.add_tensor(first, key, pattern, partial(files.read, key))
        made = mine.convert(first, model=self._model, config=self._model.config)[name]
        tensor: Tensor = made[0] if isinstance(made, list) else made
        return tensor


def _targets(converter: Any, first: str) -> list[str]:
    """The names of all that the converter makes, of which `first` is the first."""
    before, pattern, after = first.partition(converter.target_patterns[0])
    if not pattern or len(converter.target_patterns) == 1:
        return [first]
    return [f"{before}{target}{after}" for target in converter.target_patterns]
