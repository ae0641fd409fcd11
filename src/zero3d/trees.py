"""Tensors in what people pass around: nested dicts, tuples, lists, dataclasses and plain objects."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in `value`; those in an object that it holds several times, once."""
    return _found(value, set())


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor changed; objects are copied, and remain what they are."""
    return _changed(change, value, {})


def needing_grad(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _found(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    parts = _parts(value)
    if id(value) in seen:
        return
    if parts:
        seen.add(id(value))
    for inner in parts:
        yield from _found(inner, seen)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    return list(_attributes(value).values())


def _attributes(value: Any) -> dict[str, Any]:
    """Of dataclasses, with slots too, and of plain objects."""
    if isinstance(value, type | nn.Module | ModuleType):
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
