"""Tensors in what people pass around: nested dicts, tuples, lists, dataclasses and plain objects."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in `value`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        for inner in vars(value).values():
            yield from tensors_in(inner)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(change, inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, inner) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, inner) for inner in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_tensors(change, getattr(value, f.name)) for f in fields(value)})
    return value


def needing_grad(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]
