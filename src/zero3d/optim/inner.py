"""A torch optimizer over tensors of ours: pieces of shards, or whole parameters."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero3d.errors import UsageError
from zero3d.optim.rule import Rule


class Inner:
    """`named`: (parameter's name, fp32 weights that are updated in place). Gradients exist only while it steps."""

    def __init__(self, rule: Rule, named: Sequence[tuple[str, Tensor]]) -> None:
        self._tensors = [tensor for _, tensor in named]
        groups: dict[tuple[tuple[str, object], ...], list[Tensor]] = {}
        for name, tensor in named:
            groups.setdefault(tuple(rule.settings_of(name).items()), []).append(tensor)
        plain = list(groups) == [()]
        self._optimizer: torch.optim.Optimizer = rule.build(
            self._tensors if plain else [{"params": part, **dict(key)} for key, part in groups.items()]
        )
        taken = {id(tensor) for group in self._optimizer.param_groups for tensor in group["params"]}
        left = [name for name, tensor in named if id(tensor) not in taken]
        if left:
            raise UsageError(
                f"optimizer {rule.name} left out parameter {left[0]}, which it was given",
                hint="Freeze what is not to be trained (requires_grad_(False)), "
                'or give it another optimizer: {"pattern": one, "*": other}.',
            )
        for group in self._optimizer.param_groups:
            group.setdefault("initial_lr", group.get("lr"))

    @property
    def can_scale(self) -> bool:
        """Whether it scales gradients as it reads them: torch's own protocol of fused optimizers with GradScaler."""
        return bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))

    def step(self, gradients: Sequence[Tensor | None], lr: float, scale: float | None = None) -> None:
        """One update with `lr` times each group's own learning rate; a tensor whose gradient is None stays as it is.

        `scale`: only where it `can_scale`; the gradients are multiplied by it in place.
        """
        for tensor, gradient in zip(self._tensors, gradients):
            tensor.grad = gradient
        self.set_lr(lr)
        if scale is not None:
            # Filled on the device: what is copied there would wait for all that it has to do.
            self._optimizer.grad_scale = torch.full(  # type: ignore[attr-defined]
                (), 1.0 / scale, dtype=torch.float32, device=self._tensors[0].device
            )
        self._optimizer.step()
        for tensor in self._tensors:
            tensor.grad = None

    def set_lr(self, lr: float) -> None:
        """`lr` times each group's own learning rate."""
        for group in self._optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["initial_lr"] * lr

    def state(self) -> list[Mapping[str, Tensor]]:
        """Of each tensor, in their order."""
        return [self._optimizer.state.get(tensor, {}) for tensor in self._tensors]

    def set_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Of the tensor at `index`."""
        self._optimizer.state[self._tensors[index]] = dict(state)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    # Step counters are per piece, not per element: bookkeeping, no model state.
                    yield ("optimizer" if value.dim() else "buffers"), value
