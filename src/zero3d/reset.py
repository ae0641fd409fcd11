"""Values for modules that are on meta already: what `reset_parameters()` of their modules would do.

It is the convention of torch.nn that a module with parameters of its own has this method. It is called on a
copy of the model without data, parts before the whole, as constructors do; what it does is recorded.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import UsageError
from zero3d.recording import Recorder
from zero3d.tape import Cell, entries_for, is_unknown

WAYS_OUT = "pass the function that builds the model instead, or a module that has its values"
METHODS = "reset_parameters", "_reset_parameters"


def record_resets(model: nn.Module, wanted: Iterable[str]) -> dict[str, Cell | Tensor]:
    """The histories of the parameters and buffers `wanted`, by name; a tensor for a buffer that is made anew.

    Draws from torch's CPU generator if some `reset_parameters` makes random values by itself. Raises
    `UsageError` for a name that is not filled.
    """
    names = list(wanted)
    if not names:
        return {}
    for name in names:
        _reset_method(model.get_submodule(name.rpartition(".")[0]), name)
    twin = _hollow(model)
    concerned = {part for name in names for part in _above(name)}
    recorder = Recorder()
    with recorder:
        for path, module in _parts_first(twin, ""):
            if path in concerned:
                _reset(module, path, recorder)
    return {name: _found(twin, name, recorder) for name in names}


def _reset(module: nn.Module, path: str, recorder: Recorder) -> None:
    for method in METHODS:
        if hasattr(module, method):
            try:
                getattr(module, method)()
            except Exception as error:
                reason = recorder.failure or f"{type(error).__name__}: {error}"
                where = f"{method}() of {_place(module, path)}"
                raise UsageError(f"{where} cannot be recorded: {reason}", hint=WAYS_OUT) from error
            return


def _reset_method(owner: nn.Module, name: str) -> None:
    if not any(hasattr(owner, method) for method in METHODS):
        place = _place(owner, name.rpartition(".")[0])
        raise UsageError(f"{name} is on meta and {place} has no reset_parameters() to fill it", hint=WAYS_OUT)


def _found(twin: nn.Module, name: str, recorder: Recorder) -> Cell | Tensor:
    path, _, leaf = name.rpartition(".")
    owner = twin.get_submodule(path)
    tensor = getattr(owner, leaf)
    assert isinstance(tensor, Tensor)
    if tensor.device.type != "meta":
        return tensor.detach()
    cell = recorder.cell_of(tensor)
    if cell is None or recorder.failure or is_unknown(*entries_for(cell)):
        reason = f" ({recorder.failure})" if recorder.failure else ""
        where = f"reset_parameters() of {_place(owner, path)}"
        raise UsageError(f"{name} is on meta and {where} does not fill it{reason}", hint=WAYS_OUT)
    return cell


def _hollow(model: nn.Module) -> nn.Module:
    """A copy of `model` in which no parameter has data."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        hollow = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(hollow, requires_grad=parameter.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        reason = f"{type(model).__name__} is on meta and cannot be copied: {error}"
        raise UsageError(reason, hint=WAYS_OUT) from error


def _parts_first(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _parts_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _above(name: str) -> Iterator[str]:
    """Paths of all modules that `name` is in, the model's own "" included."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _place(module: nn.Module, path: str) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"
