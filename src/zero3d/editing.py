"""Edits of a model in training: it becomes plain torch, is changed, and is assembled again.

Parameters whose name and shape stay keep their master weights and optimizer state; all others begin anew, with the
values that they were given on rank 0. While it lasts every rank holds the whole model and its optimizer state.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from zero3d.access import Cut
from zero3d.carry import State, Stateful, whole_states
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.contracts import Axis
from zero3d.errors import DivergedError
from zero3d.params import ParamInfo, collect
from zero3d.precision import Scaler
from zero3d.zero.replica import ZeroReplica

Change = Callable[[nn.Module], Any]
"""change(model): whatever it does to modules and parameters, the same on every rank."""


class Editable(Protocol):
    """What is put together round a model, whoever steps it."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def infos(self) -> Sequence[ParamInfo]: ...
    @property
    def axis(self) -> RecordedAxis: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def replica(self) -> ZeroReplica: ...
    @property
    def optimizer(self) -> Stateful: ...
    @property
    def scaler(self) -> Scaler: ...
    @property
    def tensor(self) -> Cut: ...
    def close(self) -> None: ...


Parts = TypeVar("Parts", bound=Editable)


def edit(parts: Parts, sharding: Axis, change: Change, assemble_again: Callable[[nn.Module], Parts]) -> Parts:
    """The parts of the same model after `change`. `sharding`: the axis over which `parts` are sharded. Collective."""
    before = {info.name: info for info in parts.infos}
    states = {
        name: _joined(parts.tensor, before[name], state)
        for name, state in whole_states(parts.optimizer, parts.replica.shards, sharding).items()
    }
    masters = {
        name: parts.tensor.join(before[name], master.view(-1)).view(before[name].shape)
        for name, master in parts.replica.whole([info.local for info in parts.infos])
    }
    parts.close()
    parts.replica.leave()
    for info in parts.infos:
        value = masters[info.name] if info.name in masters else torch.empty(info.shape, device=parts.device)
        parts.model.get_parameter(info.name).data = value.to(info.dtype)
        if info.dtype == torch.float32:
            masters.pop(info.name, None)
    change(parts.model)
    infos = collect(parts.model)
    _refuse_differing(infos, parts.axis, parts.device)
    rounded = {
        info: masters[info.name]
        for info in infos
        if info.name in masters and _holds(parts.model.get_parameter(info.name), masters[info.name])
    }
    del masters
    again = assemble_again(parts.model)
    # A model made in 16 bits was plain with rounded weights; what was not written to has its fp32 masters again.
    now = {info.name: info for info in again.infos}
    for info, master in rounded.items():
        local = now[info.name].local
        again.replica.write(local, slice(0, local.numel), again.tensor.cut(now[info.name], master.view(-1)))
    again.optimizer.fetch()
    again.optimizer.set_states(
        {
            info.name: _cut(again.tensor, now[info.name], states[info.name])
            for info in infos
            if info.trainable and info.name in states and before[info.name].shape == info.shape
        }
    )
    again.scaler.go_on_from(parts.scaler)
    return again


def _joined(cut: Cut, info: ParamInfo, state: State) -> State:
    """Whole states of what this rank has of a parameter -> of all of it."""
    return {key: cut.join(info, value) if _goes_with(info.local, value) else value for key, value in state.items()}


def _cut(cut: Cut, info: ParamInfo, state: State) -> State:
    return {key: cut.cut(info, value) if _goes_with(info, value) else value for key, value in state.items()}


def _goes_with(info: ParamInfo, value: Any) -> bool:
    """Whether a state has an element for each of the parameter's."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == info.numel


def training_flags(parameters: Sequence[nn.Parameter]) -> bytes:
    """Which of them the user wants trained now, one byte each."""
    with torch._C.DisableTorchFunctionSubclass():  # past the guards of released ones, which take microseconds each
        return bytes(parameter.requires_grad for parameter in parameters)


def _holds(parameter: nn.Parameter, master: Tensor) -> bool:
    """Whether the parameter still is its master weights, rounded."""
    return parameter.shape == master.shape and torch.equal(parameter.detach(), master.to(parameter))


def _refuse_differing(infos: list[ParamInfo], axis: Axis, device: torch.device) -> None:
    text = " ".join(f"{info.name} {info.shape} {info.dtype} {info.trainable} {info.ties}" for info in infos)
    digests = torch.empty(axis.size, dtype=torch.int64, device=device)
    mine = torch.tensor([zlib.crc32(text.encode())], dtype=torch.int64, device=device)
    axis.all_gather(digests, mine, "digest of an edited model").wait()
    if len(set(digests.tolist())) > 1:
        raise DivergedError(
            "ranks made different edits: names, shapes or requires_grad of parameters differ",
            hint="The function that is given to engine.edit must do the same on every rank.",
        )
