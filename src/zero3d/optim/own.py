"""Torch optimizers that the user made and steps: from now on they update this rank's slices of the parameters."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import UsageError
from zero3d.optim.probe import is_elementwise
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

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises `UsageError` for one that cannot work on slices."""
        kind = type(optimizer).__name__
        if not is_elementwise(kind, partial(_another, optimizer)):
            raise UsageError(
                f"optimizer {kind} looks at whole matrices, and here it would get slices of them",
                hint='Use zero3d.Engine with zero.whole_parameters = ["auto"].',
            )
        if optimizer.state:
            raise UsageError(
                f"{kind} has taken a step already, and its state is not sharded",
                hint="Call zero3d.shard before the first optimizer.step().",
            )
        if not self._place(optimizer):
            raise UsageError(
                f"{kind} has no trainable parameter of the sharded model",
                hint="Make it from model.parameters() before zero3d.shard, or from sharded.parameters().",
            )
        optimizer.register_step_pre_hook(lambda optimizer, *_: self._before(optimizer))
        optimizer.register_step_post_hook(lambda optimizer, *_: self._after(optimizer))

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
        self._names.update((piece, name) for name, piece in self.slices.items())
        self._names.update((parameter, name) for name, parameter in model.named_parameters())
        for optimizer in self.names_of:
            optimizer.state.clear()
            self._place(optimizer)

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
                        for key, value in states[piece.name].items():
                            state[key] = value
                            if isinstance(value, Tensor) and value.dim():
                                state[key] = value.new_zeros(piece.stop - piece.start)
                                state[key][: piece.numel] = value[piece.begin : piece.begin + piece.numel]

    def _place(self, optimizer: torch.optim.Optimizer) -> bool:
        """Puts slices where their parameters are named, and the model's own where they are frozen now; whether there
        are slices."""
        own = {name: one for one, name in self._names.items() if name not in self.slices}
        names: set[str] = set()
        for group in optimizer.param_groups:
            known = [self._names.get(one, "") for one in group["params"]]
            group["params"] = [self.slices.get(name, own.get(name, one)) for name, one in zip(known, group["params"])]
            names.update(name for name in known if name in self.slices)
        self.names_of[optimizer] = frozenset(names)
        return bool(names)


def _another(optimizer: torch.optim.Optimizer, parameters: Sequence[Any]) -> torch.optim.Optimizer:
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
