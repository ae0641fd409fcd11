"""What a Trainer holds as its optimizer: learning rates and settings by group, while the Engine updates shards."""

import glob
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zero3d.contracts import OptimizerFactory
from zero3d.errors import UsageError
from zero3d.optim.own import another

BOOKKEEPING = {"params", "lr", "initial_lr"}
"""Entries of a group that are no settings of the update."""


class DrivenOptimizer(torch.optim.Optimizer):
    """Stands for `optimizer`, whose groups it takes over: a scheduler changes their learning rates, as ever. What is
    updated is elsewhere, so its groups hold a placeholder each, and `step` has nothing left to do."""

    _is_accelerate_prepared = True  # Accelerate's mark of what it must not wrap in a class of its own.

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        placeholders = [{"params": [nn.Parameter(torch.empty(0))]} for _ in optimizer.param_groups]
        super().__init__(placeholders, optimizer.defaults)
        for group, placeholder in zip(optimizer.param_groups, placeholders):
            group["params"] = placeholder["params"]
        # The same groups: a scheduler that the user made beforehand changes these.
        self.param_groups = optimizer.param_groups
        self.peaks = [_peak(group) for group in self.param_groups]
        self._settings = [settings_of(group) for group in self.param_groups]
        self.step_was_skipped = False

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What Accelerate looks for to find a scheduler's optimizer."""
        return self

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The Engine has made the update already."""

    def factor(self) -> float:
        """Of the learning rates that the optimizer was made with: what all groups' are now. Raises `UsageError` where
        groups went apart, or other settings changed."""
        for group, settings in zip(self.param_groups, self._settings):
            changed = [key for key, value in settings_of(group).items() if key in settings and settings[key] != value]
            if changed:
                raise UsageError(
                    f"{changed[0]} of a group of the optimizer was changed in training",
                    hint="Shards follow the learning rate alone. For more use a loop of your own with zero3d.shard.",
                )
        factors = [float(group["lr"]) / peak for group, peak in zip(self.param_groups, self.peaks) if peak]
        if any(abs(one - factors[0]) > 1e-9 * max(abs(factors[0]), 1e-9) for one in factors):
            raise UsageError(
                f"learning rates of the optimizer's groups went apart: they are {factors} of what they were at first",
                hint="One schedule for all groups works; for several use a loop of your own with zero3d.shard.",
            )
        return factors[0] if factors else 1.0

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Learning rates by group. Moments are in zero3d's checkpoint; settings are those of this training."""
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise UsageError(
                f"the checkpoint's optimizer has {len(saved)} groups, and this one {len(self.param_groups)}",
                hint="Resume with the optimizer that was saved.",
            )
        for group, other in zip(self.param_groups, saved):
            group.update({key: other[key] for key in ("lr", "initial_lr") if key in other})


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in BOOKKEEPING}


def factories_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, OptimizerFactory]:
    """Patterns of parameter names -> functions that make an optimizer like `optimizer`, with a group's settings.

    Raises `UsageError` for an optimizer that has stepped, that must be told of evaluation, or that leaves out a
    parameter that is to be trained.
    """
    kind = type(optimizer).__name__
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise UsageError(
            f"{kind} has taken a step already, and its state is not sharded",
            hint="Give Zero3dTrainer an optimizer that is new.",
        )
    if callable(getattr(optimizer, "eval", None)):
        raise UsageError(
            f"{kind} has other weights in evaluation than in training, of which shards know nothing",
            hint="Use another optimizer with Zero3dTrainer.",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        ([names[id(one)] for one in group["params"] if id(one) in names], group) for group in optimizer.param_groups
    ]
    taken = {name for named, _ in groups for name in named}
    left = [name for name, one in model.named_parameters() if one.requires_grad and name not in taken]
    if left or not taken:
        raise UsageError(
            f"{kind} was given {len(taken)} parameters of the model, and not {left[0] if left else 'one of them'}",
            hint="Freeze what is not to be trained (requires_grad_(False)), and make the optimizer from "
            "trainer.model.parameters().",
        )
    # The largest group takes what no other name matches: a few patterns, and not one for each parameter.
    groups.sort(key=lambda one: len(one[0]))
    made: dict[str, OptimizerFactory] = {}
    for named, group in groups[:-1]:
        factory = partial(_like, optimizer, _peak(group), settings_of(group))
        made.update({glob.escape(name): factory for name in named})
    last = groups[-1][1]
    made["*"] = partial(_like, optimizer, _peak(last), settings_of(last))
    return made


def _like(
    optimizer: torch.optim.Optimizer, lr: float, settings: Mapping[str, Any], parameters: Sequence[Any]
) -> torch.optim.Optimizer:
    made = another(optimizer, parameters)
    for group in made.param_groups:
        group.update({**settings, "lr": lr})
    return made


def _peak(group: Mapping[str, Any]) -> float:
    """The learning rate that a group was made with: a warm-up may have begun already."""
    return float(group.get("initial_lr", group["lr"]))
