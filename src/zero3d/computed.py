"""What is computed for real in a rehearsal too, where other tensors have no data."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Given = ParamSpec("Given")
Result = TypeVar("Result")


def computed(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """`function`, of small tensors of its own, outside of all modes that would take its operations."""

    @wraps(function)
    def real(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return real


def is_fake(tensor: Tensor) -> bool:
    """Whether it has a shape and no data."""
    return hasattr(tensor, "fake_mode")


def in_rehearsal() -> bool:
    """Whether new tensors are fake."""
    return is_fake(torch.empty(0))
