"""Tensors in what people pass around: nested dicts, tuples, lists, dataclasses and plain objects."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

_SIMPLE = frozenset({type(None), bool, int, float, str})
"""Types of values that hold nothing."""
_NO_TENSORS = _SIMPLE | {tuple, list, dict, OrderedDict, set}
"""Types of most attributes of modules: looking one up is several times faster than asking whether it is a tensor."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in `value`; those in an object that it holds several times, once."""
    found: list[Tensor] = []
    _find(value, found, set())
    return iter(found)


def tensors_on(module: nn.Module) -> list[Tensor]:
    """Tensors that are attributes of `module` itself, neither parameters nor buffers."""
    values = vars(module).values()
    if _NO_TENSORS.issuperset(map(type, values)):
        return []
    return [value for value in values if isinstance(value, Tensor)]


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor changed; objects are copied, and remain what they are."""
    return _changed(change, value, {})


def needing_grad(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _find(value: Any, found: list[Tensor], seen: set[int]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    if type(value) in _SIMPLE or id(value) in seen:
        return
    parts = _parts(value)
    if parts:
        seen.add(id(value))
    for inner in parts:
        _find(inner, found, seen)


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return list(value.values())
    return list(_attributes(value).values())


def _attributes(value: Any) -> dict[str, Any]:
    """Of dataclasses, with slots too, and of plain objects; the buffers of an axis are its own."""
    if isinstance(value, type | nn.Module | ModuleType) or hasattr(type(value), "all_gather"):
        return {}
    slots = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)} if _is_data(value) else {}
    return {**slots, **getattr(value, "__dict__", {})}


def _is_data(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _changed(change: Callable[[Tensor], Tensor], value: Any, twins: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return {key: _changed(change, inner, twins) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(change, inner, twins) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(_changed(change, inner, twins) for inner in value)
    if next(tensors_in(value), None) is None:
        return value
    twin = twins[id(value)] = copy.copy(value)
    if isinstance(value, MutableMapping):
        for key, inner in value.items():
            twin[key] = _changed(change, inner, twins)
        return twin
    for name, inner in _attributes(value).items():
        object.__setattr__(twin, name, _changed(change, inner, twins))  # even of a frozen dataclass
    return twin
