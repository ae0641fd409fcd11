"""Optimizer state by parameter, whole and on every rank: what goes from one assembly of a model to the next.

What a rank has is told to the others as text (names, kinds, numbers); elements then move range by range.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zero3d.comm.ranges import elements
from zero3d.comm.texts import everyones_text
from zero3d.contracts import Axis
from zero3d.zero.shard import Shard

State = dict[str, Any]
"""Key -> a tensor, flat and of all elements (of its own shape for a parameter that is updated whole), or a number."""


class Stateful(Protocol):
    """An optimizer as this module sees it."""

    def state_of(self, shard: Shard) -> Mapping[str, Mapping[str, Tensor]]: ...
    def whole_state(self) -> Mapping[str, Mapping[str, Tensor]]: ...
    def set_states(self, states: Mapping[str, Mapping[str, Any]]) -> None: ...
    def fetch(self) -> None: ...


def whole_states(optimizer: Stateful, shards: Sequence[Shard], axis: Axis) -> dict[str, State]:
    """The state of each parameter that has one. `axis`: what the shards are cut over. Collective."""
    device = shards[0].device if shards else torch.device("cpu")
    pieces = {name: state for shard in shards for name, state in optimizer.state_of(shard).items() if name and state}
    mine = {name: {key: _told(value, None) for key, value in state.items()} for name, state in pieces.items()}
    owned = optimizer.whole_state()
    for name, whole in owned.items():
        mine[name] = {key: _told(value, axis.index) for key, value in whole.items()}
    told: dict[str, dict[str, Any]] = {}
    for text in everyones_text(json.dumps(mine), axis, device, "what optimizers keep"):
        told.update(json.loads(text))
    found: dict[str, State] = {}
    for shard in shards:
        for slot in shard.bucket.slots:
            for key, what in sorted(told.get(slot.name, {}).items()):
                state = found.setdefault(slot.name, {})
                dtype = getattr(torch, what.get("dtype", ""), None)
                if dtype is None:
                    state[key] = what["number"]
                elif "number" in what:
                    state[key] = torch.tensor(what["number"], dtype=dtype, device=device)
                elif what["owner"] is not None:
                    value = owned[slot.name][key].contiguous() if slot.name in owned else None
                    out = torch.empty(what["shape"], dtype=dtype, device=device) if value is None else value.clone()
                    axis.broadcast(out.view(-1).view(torch.uint8), what["owner"], f"{key} of {slot.name}").wait()
                    state[key] = out
                else:
                    flat = torch.zeros(shard.span.stop - shard.span.start, dtype=dtype, device=device)
                    for piece in shard.pieces:
                        if piece.name == slot.name:
                            flat[piece.start : piece.stop] = pieces[slot.name][key]
                    span = slice(slot.offset, slot.offset + slot.numel)
                    state[key] = elements(axis, shard.bucket, flat, span, device)
    return found


def _told(value: Any, owner: int | None) -> Mapping[str, Any]:
    """What other ranks must know of one entry."""
    if not isinstance(value, Tensor):
        return {"number": value}
    dtype = str(value.dtype).removeprefix("torch.")
    if not value.dim():
        return {"number": value.item(), "dtype": dtype}
    return {"dtype": dtype, "owner": owner, "shape": list(value.shape)}
