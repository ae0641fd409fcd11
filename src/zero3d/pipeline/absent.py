"""Tensors that another stage has: their shape and dtype are known here, their values are not.

A stage runs the user's own forward from the start. What stages before it compute stands there as absent tensors:
operations on them are not computed but written down, until a module of this stage, or the loss, needs the values. Then
the `Source`s at the bottom are asked for, and what was written down is computed. What depends on shapes alone, such
as a mask or positions, is computed at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero3d.errors import UsageError

SHAPES = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "is_floating_point",
        "is_complex",
        "is_sparse",
        "is_quantized",
        "is_contiguous",
        "itemsize",
        "nbytes",
        "__len__",
        "__hash__",
        "is_signed",
        "is_nested",
        "_is_view",
        "names",
        "has_names",
        "is_inference",
        "__format__",
        "__repr__",
    ]
)
"""Members that need no values."""
DEVICES = {"is_cpu": "cpu", "is_cuda": "cuda", "is_meta": "meta"}
FACTORIES = frozenset(
    [
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
    ]
)
"""Functions that look at shape and dtype alone."""
VALUES = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__contains__",
        "nonzero",
        "equal",
        "allclose",
        "is_nonzero",
        "backward",
        "register_hook",
        "detach_",
        "requires_grad_",
        "data",
        "untyped_storage",
    ]
)
"""Functions whose result is no tensor, or of a shape that values decide."""
RANDOM = frozenset(["dropout", "alpha_dropout", "feature_dropout", "bernoulli", "multinomial", "normal", "poisson"])

Resolve = Callable[["Source"], Tensor]
"""Where the values of a source come from; raises where there are none."""


class Source:
    """One tensor that a module of another stage gives: `name` is the same on all stages."""

    def __init__(self, name: str, resolve: Resolve) -> None:
        self.name = name
        self._resolve = resolve

    def value(self) -> Tensor:
        return self._resolve(self)


class Written:
    """A call that has not been made, and its result once it has."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._call: Any = (function, args, kwargs)
        self._result: Any = None
        self._with_gradient = torch.is_grad_enabled()

    def result(self) -> Any:
        if self._call is not None:
            function, args, kwargs = self._call
            if function.__name__ in RANDOM:
                raise UsageError(
                    f"a pipeline stage needs what torch.{function.__name__} gave on a stage before it",
                    hint="Draw random numbers in a module of its own, such as nn.Dropout: its output is sent along.",
                )
            with torch.set_grad_enabled(self._with_gradient):
                args, kwargs = present(args), present(kwargs)
                if _in_place(function, kwargs):  # What it was before may be needed elsewhere.
                    args = (args[0].clone(), *args[1:])
                result = function(*args, **kwargs)
            self._result, self._call = (args[0] if function.__name__ == "__setitem__" else result), None
        return self._result


class Absent(Tensor):
    """A tensor of another stage. `meta`: its twin without data; `found`: gives its values."""

    meta: Tensor
    found: Callable[[], Tensor]
    on: torch.device
    is_source = False

    @staticmethod
    def of(meta: Tensor, found: Callable[[], Tensor], on: torch.device) -> "Absent":
        absent: Absent = torch.Tensor._make_subclass(Absent, meta, meta.requires_grad)
        absent.meta, absent.found, absent.on = meta, found, on
        return absent

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(func.__self__, "__name__", "")
        if name == "register_hook" and args[0].is_source:
            return _NoHook()  # The stage that has the tensor registers it.
        if name == "device":
            return args[0].on
        if name in DEVICES:
            return args[0].on.type == DEVICES[name]
        if name == "get_device":
            return -1 if args[0].on.type == "cpu" else args[0].on.index
        if name in SHAPES:
            return func(*_twins(args, None), **kwargs)
        if name in FACTORIES:
            return func(*_dummies(args), **kwargs)
        if name not in VALUES:
            try:
                return _write_down(func, args, kwargs)
            except (RuntimeError, NotImplementedError, TypeError):
                pass  # Its shape depends on values.
        return func(*present(args), **present(kwargs))


class _NoHook:
    """The handle of a hook that is another stage's."""

    def remove(self) -> None:
        return None


def present(value: Any) -> Any:
    """`value` with the values of absent tensors in their place."""
    return _replaced(value, lambda absent: absent.found())


def is_absent(value: Any) -> bool:
    """Whether there is an absent tensor in it."""
    if isinstance(value, Absent):
        return True
    if isinstance(value, Mapping):
        return any(is_absent(one) for one in value.values())
    return isinstance(value, list | tuple) and any(is_absent(one) for one in value)


def _write_down(func: Any, args: Any, kwargs: Any) -> Any:
    absents: list[Absent] = []
    metas = _twins(args, absents), _twins(kwargs, absents)
    with torch.no_grad():
        result = func(*metas[0], **metas[1])
    if _in_place(func, kwargs):
        return _change(func, args, kwargs)
    of_now = args if _is_view(result) else _as_now(args)
    written = Written(func, of_now, _as_now(kwargs))
    on = absents[0].on

    def wrapped(meta: Any, at: tuple[Any, ...]) -> Any:
        if isinstance(meta, Tensor):
            return Absent.of(meta, lambda: _at(written.result(), at), on)
        if isinstance(meta, list | tuple):
            members = [wrapped(one, (*at, index)) for index, one in enumerate(meta)]
            return type(meta)(*members) if hasattr(meta, "_fields") else type(meta)(members)
        return meta

    return wrapped(result, ())


def _change(func: Any, args: Any, kwargs: Any) -> Any:
    """An in-place operation: the absent tensor is from now on what becomes of it."""
    changed = args[0]
    if not isinstance(changed, Absent) or changed.meta._is_view():
        raise UsageError(
            f"between modules {func.__name__} changes a tensor in place, by values or a part of one that another "
            "pipeline stage has",
            hint="Write it as an operation that gives a new tensor, such as x = x + y, or put it into a module.",
        )
    before = Absent.of(changed.meta, changed.found, changed.on)
    changed.found = Written(func, (before, *_as_now(args[1:])), _as_now(kwargs)).result
    return changed


def _as_now(value: Any) -> Any:
    """What later in-place operations do not reach."""
    return _replaced(value, lambda absent: Absent.of(absent.meta, absent.found, absent.on))


def _is_view(result: Any) -> bool:
    return isinstance(result, Tensor) and result._is_view()


def _in_place(function: Any, kwargs: Mapping[str, Any]) -> bool:
    name: str = function.__name__
    if name == "__setitem__" or kwargs.get("inplace"):
        return True
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name not in ("__invert__",))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for index in path:
        value = value[index]
    return value


def _twins(value: Any, absents: list[Absent] | None) -> Any:
    """Everything on meta."""

    def twin(absent: Absent) -> Tensor:
        if absents is not None:
            absents.append(absent)
        return absent.meta

    def other(one: Any) -> Any:
        if isinstance(one, Tensor) and absents is not None:
            return one.detach().to("meta")
        return torch.device("meta") if isinstance(one, torch.device) else one

    return _replaced(value, twin, other)


def _dummies(value: Any) -> Any:
    return _replaced(
        value, lambda absent: torch.zeros((), dtype=absent.meta.dtype, device=absent.on).expand(absent.meta.shape)
    )


def _replaced(value: Any, absent: Callable[[Absent], Any], other: Callable[[Any], Any] = lambda one: one) -> Any:
    if isinstance(value, Absent):
        return absent(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(one, absent, other) for one in value))
    if type(value) in (list, tuple):
        return type(value)(_replaced(one, absent, other) for one in value)
    if isinstance(value, Mapping) and is_absent(value):
        changed = {key: _replaced(one, absent, other) for key, one in value.items()}
        return changed if type(value) is dict else type(value)(changed)  # type: ignore[call-arg]
    return other(value)
