"""Tries out, when it first runs, whether a module computes the same with parts of its weights.

A plan of the user's own says which layers are cut, and not whether the code between them knows: heads that are counted
by an attribute, or q, k and v cut as one, would give other numbers and no error.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero3d.errors import UsageError
from zero3d.tensor.modules import Cuts
from zero3d.tensor.regions import SEQUENCE, start_gather
from zero3d.trees import tensors_in

TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE = 0.1
"""The tolerance in 16 bits."""


class Whole(Protocol):
    """Makes a module whole for a while."""

    def whole_module(self, module: nn.Module) -> AbstractContextManager[None]: ...


class Trial:
    """Of one module, once. `cut_inputs`, `cut_outputs`: these are parts of the sequence."""

    def __init__(
        self, cuts: Cuts, whole: Whole, path: str, module: nn.Module, *, cut_inputs: bool, cut_outputs: bool
    ) -> None:
        self._cuts = cuts
        self._whole = whole
        self._path = path
        self._cut_inputs = cut_inputs
        self._cut_outputs = cut_outputs
        self._running = False
        self.hook: RemovableHandle = module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._running or not self._cuts.active:
            return
        self._running = True
        flags = [(one, one.training) for one in module.modules()]
        module.eval()
        try:
            # The step's own random numbers come as they would without this.
            with torch.no_grad(), torch.random.fork_rng():
                self._compare(module, args, kwargs)
        finally:
            for one, flag in flags:
                one.training = flag
            self.hook.remove()

    def _compare(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        try:
            parts = self._outputs(module(*args, **kwargs))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise UsageError(
                f"{self._path} ({type(module).__name__}) fails with the parts of its weights that {self._ranks} "
                f"tensor-parallel ranks leave each: {error}",
                hint=WAYS_OUT.format(path=self._path),
            ) from error
        with self._whole.whole_module(module):
            whole = self._outputs(module(*self._wholes(args), **self._wholes(kwargs)))
        for part, other in zip(parts, whole):
            if self._cut_outputs:
                other = other.chunk(self._ranks, SEQUENCE)[self._cuts.axis.index]
            self._refuse_difference(part, other)

    def _refuse_difference(self, part: Tensor, whole: Tensor) -> None:
        tolerance = TOLERANCES.get(whole.dtype, COARSE)
        same = part.shape == whole.shape
        found = float((part - whole).abs().max() / whole.abs().max().clamp_min(1e-30)) if same else float("inf")
        # One rank's numbers decide for none: all of them do.
        wrong = torch.tensor([int(not found <= tolerance)], dtype=torch.int64, device=whole.device)
        self._cuts.axis.all_reduce(wrong, f"trial of {self._path}").wait()
        if int(wrong):
            raise UsageError(
                f"{self._path} gives other numbers with the parts of its weights that {self._ranks} tensor-parallel "
                "ranks leave each than with whole ones",
                hint=WAYS_OUT.format(path=self._path),
            )

    @property
    def _ranks(self) -> int:
        return self._cuts.axis.size

    def _wholes(self, inputs: Any) -> Any:
        """The first floating-point tensor among the inputs has the whole sequence."""
        if not self._cut_inputs:
            return inputs
        items = list(inputs.items()) if isinstance(inputs, dict) else list(enumerate(inputs))
        for key, one in items:
            if isinstance(one, Tensor) and one.is_floating_point():
                gathered = start_gather(one, self._cuts.axis, SEQUENCE, f"trial of {self._path}").land()
                changed = dict(items) | {key: gathered}
                return changed if isinstance(inputs, dict) else tuple(changed.values())
        return inputs

    @staticmethod
    def _outputs(output: Any) -> Sequence[Tensor]:
        return [tensor for tensor in tensors_in(output) if tensor.is_floating_point()][:1]


WAYS_OUT = (
    "Does it count heads or features by an attribute? Read them off the tensors, as in x.view(B, T, -1, head_width), "
    'or set "{path}" = "divide(name of the attribute)" in [parallel.plan]. Are q, k and v one layer? Its style is '
    '"qkv(heads, kv_heads)", or "gate_up" of two. Or leave it whole: "{path}" = "replicate".'
)
