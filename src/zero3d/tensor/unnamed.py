"""Finds modules that run on a part of the sequence though no plan says so: each rank would train its whole weights on a
part of their gradient.

    forward    embedding   first block ... last block   norm           head
               whole       cut                          cut: needs a style, or is refused
"""

from collections.abc import Collection, Iterable
from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from zero3d.errors import ConfigError
from zero3d.tensor.modules import Cuts
from zero3d.tensor.plan import Chosen


class Unnamed:
    """Follows where the sequence is cut as the model runs. `blocks`: the ids of all modules in blocks."""

    def __init__(self, cuts: Cuts, model: nn.Module, blocks: Collection[int], chosen: Iterable[Chosen]) -> None:
        self._cuts = cuts
        self._is_cut = False
        named = list(chosen)
        self.hooks: list[RemovableHandle] = [model.register_forward_pre_hook(self.leave)]
        for path, module in model.named_modules():
            trains = any(one.requires_grad for one in module.parameters(recurse=False))
            if path and trains and id(module) not in blocks and not any(one.holds(path) for one in named):
                self.hooks.append(module.register_forward_pre_hook(self._refusing(path)))

    def enter(self, *_: Any) -> None:
        self._is_cut = True

    def leave(self, *_: Any) -> None:
        self._is_cut = False

    def _refusing(self, path: str) -> Any:
        def refuse(*_: Any) -> None:
            if self._is_cut and self._cuts.active:
                _refuse(path)

        return refuse


def _refuse(path: str) -> NoReturn:
    raise ConfigError(
        f"{path} runs on a part of the sequence, as parallel.sequence_parallel = true, and the plan does not name it",
        hint=f'Set "{path}" = "sequence" in [parallel.plan], or "sequence_end" where its output is to be whole again.',
    )
