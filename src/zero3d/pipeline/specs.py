"""What modules give, described in JSON: dicts, tuples and lists of tensors, numbers, text and None.

{"tensor": [name, shape, dtype, needs gradient]}, {"list" | "tuple" | "dict" | "fields": ...} or {"value": ...}
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from zero3d.errors import UsageError

Spec = Any


class Fields(dict[str, Any]):
    """What a module gave as a mapping of another class, such as the outputs of Transformers: members are found by name,
    as attributes, and by number where they are not None."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return super().__getitem__(name)
        raise AttributeError(f"what the module of another pipeline stage gave has no {name}; it has {', '.join(self)}")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int | slice):
            return tuple(value for value in self.values() if value is not None)[key]
        return super().__getitem__(key)


def describe(value: Any, name: str, tensors: dict[str, Tensor]) -> Spec:
    """`value`, whose tensors go into `tensors` under names that begin with `name`. Raises `UsageError` for what is none
    of these."""
    if isinstance(value, Tensor):
        tensors[name] = value
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [name, list(value.shape), dtype, value.requires_grad]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        members = {key: describe(one, f"{name}.{key}", tensors) for key, one in value.items()}
        if type(value) is dict:
            return {"dict": members}
        # Fields of a dataclass that are None are no keys of it.
        absent: dict[str, Spec] = {one.name: {"value": None} for one in fields(value)} if is_dataclass(value) else {}
        return {"fields": {**absent, **members}}
    if type(value) in (list, tuple):
        listed = [describe(one, f"{name}.{index}", tensors) for index, one in enumerate(value)]
        return {type(value).__name__: listed}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    what = "with keys that are no texts " if isinstance(value, Mapping) else ""
    raise UsageError(
        f"{name.partition('#')[0]} gives a {type(value).__name__} {what}which cannot cross a pipeline stage's boundary",
        hint="Blocks may give tensors, numbers, text and None, in tuples, lists and dicts whose keys are texts.",
    )


def rebuild(spec: Spec, tensor: Callable[[str, tuple[int, ...], torch.dtype, bool], Any]) -> Any:
    """What `spec` describes, with what `tensor` gives for each tensor's description."""
    ((kind, value),) = spec.items()
    if kind == "tensor":
        name, shape, dtype, needs_gradient = value
        return tensor(name, tuple(shape), getattr(torch, dtype), needs_gradient)
    if kind in ("dict", "fields"):
        named = {key: rebuild(one, tensor) for key, one in value.items()}
        return named if kind == "dict" else Fields(named)
    if kind in ("list", "tuple"):
        members = [rebuild(one, tensor) for one in value]
        return tuple(members) if kind == "tuple" else members
    return value


def values_of(spec: Any) -> list[Any]:
    """All numbers and texts in it, and in dicts and lists of such."""
    if not isinstance(spec, dict):
        return [value for one in spec for value in values_of(one)] if isinstance(spec, list) else []
    found = [spec["value"]] if set(spec) == {"value"} else []
    return found + [value for key, one in spec.items() if key != "tensor" for value in values_of(one)]
