"""Torch optimizers that the user made and steps: from now on they update this rank's slices of the parameters."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import UsageError
from zero3d.optim.probe import is_elementwise
from zero3d.optim.sharded import cut
from zero3d.params import ParamInfo
from zero3d.zero.shard import Shard


class OwnOptimizers:
    """Puts slices in the place of parameters, in the groups and with the settings that the user chose.

    before, after: called round each step of one of them
    """

    def __init__(
        self,
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._names: dict[nn.Parameter, str] = {}
        self._before = before
        self._after = after
        self.slices: dict[str, nn.Parameter] = {}
        self._shards: Sequence[Shard] = ()
        self.names_of: dict[torch.optim.Optimizer, frozenset[str]] = {}
        self._sizes: dict[torch.optim.Optimizer, int] = {}
        self._depth: Counter[torch.optim.Optimizer] = Counter()

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises `UsageError` for one that cannot work on slices."""
        kind = type(optimizer).__name__
        if not is_elementwise(kind, partial(another, optimizer)):
            raise UsageError(
                f"optimizer {kind} looks at whole matrices, and here it would get slices of them",
                hint='Use zero3d.Engine with zero.whole_parameters = ["auto"].',
            )
        states = self._first_states(optimizer)
        if not self._place(optimizer):
            raise UsageError(
                f"{kind} has no trainable parameter of the sharded model",
                hint="Make it from model.parameters() before zero3d.shard, or from sharded.parameters().",
            )
        optimizer.state.clear()
        self.set_states(states)
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def forget_steps(self) -> None:
        """A backward begins: no step is under way, even if one ended with an error."""
        self._depth.clear()

    def cut(self, model: nn.Module, infos: Sequence[ParamInfo], shards: Sequence[Shard], device: torch.device) -> None:
        """`slices` are this rank's of each trainable parameter, empty where it has none; known optimizers get them."""
        found = {
            piece.name: nn.Parameter(shard.master[piece.start : piece.stop])
            for shard in shards
            for piece in shard.pieces
        }
        self.slices = {
            info.name: found.get(info.name, nn.Parameter(torch.empty(0, device=device)))
            for info in infos
            if info.trainable and info.numel
        }
        self._shards = shards
        now: dict[nn.Parameter, str] = {piece: name for name, piece in self.slices.items()}
        now.update((parameter, name) for name, parameter in model.named_parameters())
        self._names.update(now)  # Groups have what was before.
        for optimizer in self.names_of:
            optimizer.state.clear()
            self._place(optimizer)
        self._names = now

    def state_of(self, shard: Shard) -> Mapping[str, Mapping[str, Tensor]]:
        """By parameter name: what optimizers keep for this rank's slices of `shard`."""
        return {
            piece.name: optimizer.state[self.slices[piece.name]]
            for piece in shard.pieces
            for optimizer, names in self.names_of.items()
            if piece.name in names and self.slices[piece.name] in optimizer.state
        }

    def whole_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {}

    def fetch(self) -> None:
        """Slices are the master weights themselves."""

    def set_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Whole states by parameter name become those of the slices."""
        for shard in self._shards:
            for piece in shard.pieces:
                for optimizer, names in self.names_of.items():
                    if piece.name in states and piece.name in names:
                        state = optimizer.state[self.slices[piece.name]]
                        state.update((key, cut(value, piece)) for key, value in states[piece.name].items())

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A subclass may call the step of its class inside its own, and both call this.
        self._depth[optimizer] += 1
        if self._depth[optimizer] > 1:
            return
        try:
            if any(one is not None for one in (*args[1:], kwargs.get("closure"))):
                raise UsageError(
                    "optimizer.step was given a closure, whose gradients would come too late to be summed over ranks",
                    hint="Call backward first, and optimizer.step() without a closure.",
                )
            if sum(len(group["params"]) for group in optimizer.param_groups) != self._sizes[optimizer]:
                self._place(optimizer)  # There are groups that came later.
            self._before(optimizer)
        except BaseException:
            self._depth[optimizer] = 0
            raise

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[optimizer] -= 1
        if self._depth[optimizer] == 0:
            self._after(optimizer)

    def _first_states(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """What an optimizer keeps from the start, whole and flat, by parameter name."""
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):
            raise UsageError(
                f"{type(optimizer).__name__} has taken a step already, and its state is not sharded",
                hint="Call zero3d.shard before the first optimizer.step().",
            )
        names = {id(parameter): name for parameter, name in self._names.items()}
        return {
            names[id(parameter)]: {
                key: value.detach().reshape(-1) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state.items()
            }
            for parameter, state in optimizer.state.items()
            if id(parameter) in names
        }

    def _place(self, optimizer: torch.optim.Optimizer) -> bool:
        """Puts slices where their parameters are named, and the model's own where they are frozen now; whether there
        are slices. What is named twice stays where it was put last."""
        own = {name: one for one, name in self._names.items() if name not in self.slices}
        names: set[str] = set()
        for group in reversed(optimizer.param_groups):
            kept = []
            for one in group["params"]:
                name = self._names.get(one, "")
                if name not in names:
                    kept.append(self.slices.get(name, own.get(name, one)))
                if name in self.slices:
                    names.add(name)
            group["params"] = kept
        self.names_of[optimizer] = frozenset(names)
        self._sizes[optimizer] = sum(len(group["params"]) for group in optimizer.param_groups)
        return bool(names)


def another(optimizer: torch.optim.Optimizer, parameters: Sequence[Any]) -> torch.optim.Optimizer:
    """One of the same class and settings for other parameters, however its constructor is called."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    # A scheduler puts a `step` of its own into the object.
    other.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    other.state = defaultdict(dict)
    other.param_groups = []
    other._optimizer_step_pre_hooks = OrderedDict()
    other._optimizer_step_post_hooks = OrderedDict()
    other.add_param_group({"params": list(parameters)})
    return other
