"""Sees to it that weights which have no values yet are not computed with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zero3d.errors import UsageError

aten = torch.ops.aten
SHARES = (aten.detach.default, aten.alias.default, aten.view.default)
"""Operations that make another tensor of the same memory, and read nothing."""


class Untouched(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Inside, an operation on one of these parameters raises `UsageError`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._names = {_key(tensor): name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in recording.py: torch would import its compiler.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SHARES:
            for value in (*args, *(kwargs or {}).values()):
                for one in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(one, Tensor) and _key(one) in self._names:
                        raise UsageError(
                            f"{self._names[_key(one)]} was used ({func}) by `adapt`, before its values were read",
                            hint="adapt may put parameters elsewhere and add others; copying or computing with them "
                            "needs the values. Build the whole model in memory instead, and pass the module.",
                        )
        return func(*args, **(kwargs or {}))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
