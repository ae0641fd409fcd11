"""A parameter whose data is not there, or not yet, keeps its shape, dtype, name and identity, and says so when touched.

While guarded, the parameter's class is a subclass of its own that looks at every torch call. Calls that ask for
metadata pass; for all others `touched` either makes the data come, and the call goes on, or raises
`ReleasedParameterError`. Unguarded it is what the user made.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

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
        self._open = [(parameter, type(parameter)) for _, parameter in parameters]
        self._closed = [_guarded(type(parameter), name, touched) for name, parameter in parameters]
        self.closed = False

    def close(self) -> None:
        for (parameter, _), guarded in zip(self._open, self._closed):
            parameter.__class__ = guarded
        self.closed = True

    def open(self) -> None:
        for parameter, original in self._open:
            parameter.__class__ = original
        self.closed = False


def _guarded(base: type[nn.Parameter], name: str, touched: Touched) -> type[nn.Parameter]:
    def look(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = getattr(function, "__name__", "")
        if call in ("__get__", "__set__", "__delete__"):
            call = getattr(function.__self__, "__name__", "")
        if call == "__repr__":
            shape = ", ".join(str(extent) for extent in torch.Tensor.size(args[0]))
            return f"Parameter {name} [{shape}], released"
        if call not in METADATA:
            touched(name)
            return function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def copied(self: nn.Parameter, memo: dict[int, Any]) -> Any:
        touched(name)  # which takes the guard off, so that the copy is not guarded
        return copy.deepcopy(self, memo)

    members = {"__torch_function__": classmethod(look), "__deepcopy__": copied, "__module__": base.__module__}
    return type(base.__name__, (base,), members)
