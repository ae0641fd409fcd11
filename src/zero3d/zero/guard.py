"""A parameter whose data is not there, or not yet, keeps its shape, dtype, name and identity, and says so when touched.

While guarded, the parameter's class is a subclass, one for all of a bucket, that looks at every torch call. Calls that
ask for metadata pass; for all others `touched` either makes the data come, and the call goes on, or raises
`ReleasedParameterError`. Unguarded it is what the user made.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero3d.trees import tensors_in

Touched = Callable[[str], None]
"""Called with the parameter's name; returns once its data is there and the guard is lifted, or raises."""

METADATA = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "grad",
        "grad_fn",
        "is_leaf",
        "ndim",
        "layout",
        "names",
        "grad_dtype",
        "_version",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_meta",
        "is_quantized",
        "is_complex",
        "is_floating_point",
        "retains_grad",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "size",
        "dim",
        "numel",
        "nelement",
        "ndimension",
        "stride",
        "storage_offset",
        "element_size",
        "nbytes",
        "itemsize",
        "is_contiguous",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__hash__",
        "__len__",
        "is_inference",
        "_is_view",
        "has_names",
        "is_signed",
        "get_device",
    ]
)


class Guard:
    """Guards the parameters of one bucket."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], touched: Touched) -> None:
        # A class for each parameter would be another one to fetch from memory at every assignment below.
        guarded = {base: _guarded(base, self) for base in {type(parameter): None for _, parameter in parameters}}
        self._classes = [(parameter, type(parameter), guarded[type(parameter)]) for _, parameter in parameters]
        self._names = {id(parameter): name for name, parameter in parameters}
        self._touched = touched
        self.closed = False

    def close(self) -> None:
        for parameter, _, guarded in self._classes:
            parameter.__class__ = guarded
        self.closed = True

    def open(self) -> None:
        for parameter, original, _ in self._classes:
            parameter.__class__ = original
        self.closed = False

    def touch(self, values: Any) -> None:
        """The data of the parameters in `values` is needed."""
        self._touched(self.name_in(values))

    def name_in(self, values: Any) -> str:
        """The name of the first of these parameters in `values`, or of any of them where it cannot be found."""
        found = (self._names.get(id(tensor)) for tensor in tensors_in(values))
        return next((name for name in found if name is not None), next(iter(self._names.values())))


def _guarded(base: type[nn.Parameter], guard: Guard) -> type[nn.Parameter]:
    def look(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = getattr(function, "__name__", "")
        if call in ("__get__", "__set__", "__delete__"):
            call = getattr(function.__self__, "__name__", "")
        if call == "__repr__":
            shape = ", ".join(str(extent) for extent in torch.Tensor.size(args[0]))
            return f"Parameter {guard.name_in(args)} [{shape}], released"
        if call not in METADATA:
            guard.touch((args, kwargs))
            return function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def copied(self: nn.Parameter, memo: dict[int, Any]) -> Any:
        guard.touch(self)  # which takes the guard off, so that the copy is not guarded
        return copy.deepcopy(self, memo)

    members = {"__torch_function__": classmethod(look), "__deepcopy__": copied, "__module__": base.__module__}
    return type(base.__name__, (base,), members)
