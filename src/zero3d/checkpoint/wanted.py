"""What a rank wants of a checkpoint: what is to be read into which of its tensors, and what becomes of it then."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zero3d.checkpoint.fit import Fit
from zero3d.checkpoint.manifest import Entry, Number
from zero3d.checkpoint.read import DTYPES, Job
from zero3d.checkpoint.slices import Span, copies, number_of, whole
from zero3d.checkpoint.state import Holdings
from zero3d.errors import UsageError
from zero3d.zero.shard import Shard

States = dict[str, dict[str, Any]]


class Wanted:
    """All is read beside what is there, until `keep`: nothing is half one and half the other, whatever turns out to be
    damaged on some rank. Weights are read into the host's memory, so that a device needs no room for them."""

    def __init__(self, holdings: Holdings, fit: Fit) -> None:
        self._holdings = holdings
        self._fit = fit
        self._states: list[tuple[Shard, States]] = []
        self._whole: States = {}
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._weights: list[tuple[Tensor, Tensor]] = []
        self.jobs: list[Job] = []
        for held in holdings.weights():
            if held.name in fit.weights:
                value = torch.empty(held.tensor.numel(), dtype=held.tensor.dtype)
                self.jobs += _jobs(fit.weights[held.name], held.span, value)
                self._weights.append((held.tensor, value))
        for shard in holdings.parts.replica.shards:
            self._states.append((shard, self._states_of(shard)))
        self._want_whole()
        for name, entry in fit.buffers.items():
            buffer = holdings.buffer_names[name]
            value = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
            self.jobs += _jobs(entry, Span(whole(entry.shape), 0, entry.numel), value)
            self._buffers.append((buffer, value))

    @torch.no_grad()
    def keep(self) -> None:
        """What was read is the state from now on. State that there was and that the checkpoint lacks is gone."""
        self.jobs.clear()
        while self._weights:
            weight, value = self._weights.pop()
            weight.copy_(value)
        optimizer = self._holdings.optimizer
        while self._states:  # What is kept is copied: two of all would be too much.
            shard, states = self._states.pop()
            optimizer.set_state_of(shard, states)
            if shard.weights.data_ptr() != shard.master.data_ptr():  # Of another home nothing else brings them.
                shard.weights.copy_(shard.master)
        optimizer.set_whole_state(self._whole)
        for buffer, value in self._buffers:
            buffer.copy_(value.view(buffer.shape))

    def let_go(self) -> None:
        """Of what was read: it takes room, and will not be kept."""
        for one in (self.jobs, self._weights, self._states, self._whole, self._buffers):
            one.clear()

    def _states_of(self, shard: Shard) -> States:
        found: States = {}
        for piece in shard.pieces:
            if not piece.name or piece.name in self._holdings.optimizer.updates_whole:
                continue
            span = Span(self._holdings.part(piece.name), piece.begin, piece.numel)
            state = found[piece.name] = self._numbers(piece.name, shard.master.device)
            for entry in self._fit.states.get(piece.name, ()):
                if entry.shape != list(self._holdings.infos[piece.name].shape):
                    raise UsageError(
                        f"{entry.label} has shape {entry.shape}, which no optimizer has that treats each element of "
                        f"{piece.name} by itself",
                        hint="Resume with the optimizer that was saved, or give allow_missing to a checkpoint of "
                        "weights alone.",
                    )
                value = torch.empty(piece.stop - piece.start, dtype=DTYPES[entry.dtype], device=shard.master.device)
                self.jobs += _jobs(entry, span, value)
                state[entry.key] = value
        return found

    def _want_whole(self) -> None:
        shards = self._holdings.parts.replica.shards
        for name, here in self._holdings.optimizer.updates_whole.items():
            if not here:
                continue
            device = next(shard.master.device for shard in shards if any(s.name == name for s in shard.bucket.slots))
            state = self._whole[name] = self._numbers(name, device)
            for entry in self._fit.states.get(name, ()):
                value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)
                self.jobs += _jobs(entry, Span(whole(entry.shape), 0, entry.numel), value.view(-1))
                state[entry.key] = value

    def _numbers(self, name: str, device: torch.device) -> dict[str, Any]:
        return {key: _value(one, device) for key, one in self._fit.numbers.get(name, {}).items()}


def _value(one: Number, device: torch.device) -> Any:
    if one.dtype is None:
        return one.value
    dtype = DTYPES[one.dtype]
    value = float(one.value) if isinstance(one.value, str) else one.value  # JSON has no infinity.
    return torch.tensor(value, dtype=dtype, device=device)


def _jobs(entry: Entry, span: Span, out: Tensor) -> Iterator[Job]:
    """Of `out`, flat, whose beginning is `span` of the tensor, and whose values do not matter yet."""
    dtype = DTYPES[entry.dtype]
    found, same = 0, False
    for piece, source in entry.spans():
        for copy in copies(source, span):
            found += copy.rows * copy.length
            same = same or source.part == span.part
            yield Job(file=piece.file, offset=piece.offset, dtype=dtype, copy=copy, out=out)
    if found < out.numel():  # Padding is zeros.
        out.zero_()
    assert found == (span.numel if same else number_of(span)), entry.label
