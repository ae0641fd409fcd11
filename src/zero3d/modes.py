"""Training and evaluation mode, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    """All modules in training mode, or in evaluation mode; each as it was afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.train(train)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
