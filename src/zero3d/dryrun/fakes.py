"""Tensors without data, for all that is large; small integers are computed.

A rehearsal decides by shapes, by counts and by what ranks tell each other: small integers, and real. All floats are
fake, and so is what is computed of them. Where our own code reads the value of a fake number, such as a loss, it gets
1.0; where the user's code does, what would follow is not known, and it is refused.
"""

import logging
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero3d.computed import is_fake
from zero3d.dryrun.refusing import VALUES_HINT, caller, is_ours, place
from zero3d.errors import UsageError

REAL_BYTES = 1 << 20
"""Up to which new tensors of integers have data."""
LOOKED_AT = 1 << 12
"""Elements from which on an operation on real tensors is tried on fake ones first: what comes of it may be large."""
DEVICE = torch.ops.prim.device.default
GROUPED = torch.ops.aten._grouped_mm.default
LOGGER = logging.getLogger(fake_tensor.__name__)
VALUES = {True: 1.0, False: 1}


class Fakes(TorchDispatchMode):
    """Inside, new tensors are fake unless they are small integers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._quiet = _Quiet()

    def __enter__(self) -> "Fakes":
        LOGGER.addFilter(self._quiet)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        LOGGER.removeFilter(self._quiet)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # Asked for at every turn, and known.
            return getattr(args[0], "fake_device", None) or func(*args)
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(is_fake(tensor) for tensor in tensors):
            return self._of_fakes(func, tensors, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            return func(*args, **kwargs)
        if tensors and all(tensor.numel() < LOOKED_AT or tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        with self.mode:
            result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if all(one.nbytes <= REAL_BYTES and (tensors or not one.is_floating_point()) for one in made):
            return func(*args, **kwargs)
        return result

    def _of_fakes(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and is_ours(caller()):
            dtype = tensors[0].dtype
            return False if dtype is torch.bool else VALUES[dtype.is_floating_point]
        try:
            if func is GROUPED and tensors[0].dtype is not torch.bfloat16:
                return _grouped(args, kwargs)
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _refusal(func, "needs the values of a tensor") from error
        except UnsupportedOperatorException as error:
            raise _refusal(func, "has no rule for the shape of what it gives") from error


def _grouped(args: Any, kwargs: Any) -> Tensor:
    """torch computes it of all floats, and knows the shape for one dtype alone."""
    one, other, *more = args
    result: Tensor = GROUPED(one.bfloat16(), other.bfloat16(), *more, **kwargs).to(one.dtype)
    return result


def _refusal(func: Any, why: str) -> UsageError:
    frame = caller()
    return UsageError(
        f"the model cannot be rehearsed: {func.name()} at {place(frame, frame.f_lineno)} {why}, "
        "and a rehearsal has shapes alone",
        hint=VALUES_HINT,
    )


class _Quiet(logging.Filter):
    """What torch cannot do with tensors without data is told by an error; it logs the traceback of each as well."""

    def filter(self, record: logging.LogRecord) -> bool:
        return False
