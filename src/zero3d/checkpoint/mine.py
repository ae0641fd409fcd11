"""What one rank writes: what it alone has, and its share of what several hold alike."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from zero3d.checkpoint.manifest import Entry, File, Number, Piece, Slice, What
from zero3d.checkpoint.place import Place
from zero3d.checkpoint.slices import share
from zero3d.checkpoint.state import Held, Holdings
from zero3d.checkpoint.write import NAMES, Out, Plan, Source, as_it_is, plan, write
from zero3d.errors import UsageError
from zero3d.zero.shard import Shard


class Mine:
    """What this rank writes: its plan, and its part of the manifest."""

    def __init__(self, holdings: Holdings, what: What, *, copies_buffers: bool = False) -> None:
        """`copies_buffers`: they may change before they are written, with every forward."""
        chosen = [_copied(one) if copies_buffers and one.kind == "buffer" else one for one in _chosen(holdings, what)]
        self._written = [(one, *_mine(one)) for one in chosen]
        self._written = [one for one in self._written if one[1] < one[2]]
        self.plan: Plan = plan([_out(held, first, stop) for held, first, stop in self._written])
        self._numbers: dict[str, dict[str, Number]] = {}
        if what != "weights":
            for name, key, value in holdings.numbers():
                self._numbers.setdefault(name, {})[key] = _number(name, key, value)

    @property
    def owners(self) -> dict[str, Shard | None]:
        """Key -> whose update changes what is written under it."""
        return {_key(held, first, stop): held.shard for held, first, stop in self._written}

    def write(self, folder: Place, rank: int, source: Source = as_it_is, mark: str = "") -> str:
        """-> what rank 0 must know of it. source: gives what is written, when it is; mark: ends the file's name."""
        file: File | None = None
        if self._written:
            file = write(self.plan, folder / f"rank-{rank:05d}{mark}.safetensors", source)
        return json.dumps(
            {
                "file": file and file.model_dump(),
                "tensors": [entry.model_dump() for entry in self._entries()],
                "numbers": {
                    name: {key: one.model_dump() for key, one in of.items()} for name, of in self._numbers.items()
                },
            }
        )

    def _entries(self) -> Iterator[Entry]:
        offsets = {out.key: offset for out, offset in zip(self.plan.outs, self.plan.offsets)}
        for held, first, stop in self._written:
            key = _key(held, first, stop)
            piece = Piece(file=0, key=key, offset=offsets[key], begin=held.span.begin + first, numel=stop - first)
            part = held.span.part
            ranges = [] if held.dim is None else list(part.ranges)
            yield Entry(
                kind=held.kind,
                name=held.name,
                key=held.key,
                shape=list(held.shape),
                dtype=_dtype(held),
                dim=held.dim,
                parts=[Slice(ranges=ranges, padding=part.padding, pieces=[piece])],
            )


def _copied(held: Held) -> Held:
    return replace(held, tensor=held.tensor.clone())


def _chosen(holdings: Holdings, what: What) -> Iterator[Held]:
    """In the order of files: kind by kind and key by key, each in the model's order."""
    yield from holdings.weights(trained_only=what == "trainable")
    if what != "weights":
        # Sorting is stable: within a key the model's order stays.
        yield from sorted(holdings.states(), key=lambda one: one.key)
    yield from holdings.buffers()


def _mine(held: Held) -> tuple[int, int]:
    """Which of the elements this rank writes."""
    if not held.counts:
        return 0, 0
    name = f"{held.kind} {held.name} {held.key} {held.span.begin}"
    return share(held.span.numel, held.alike.holders, held.alike.index, name)


def _key(held: Held, first: int, stop: int) -> str:
    """A whole tensor has its own name; of a rank's part, flattened, the range is told."""
    name = f"{held.name}/{held.key}" if held.key else held.name
    return name if _is_all(held, first, stop) else f"{name}[{held.span.begin + first}:{held.span.begin + stop}]"


def _is_all(held: Held, first: int, stop: int) -> bool:
    return held.dim is None and stop - first == math.prod(held.shape)


def _out(held: Held, first: int, stop: int) -> Out:
    _dtype(held)
    shape = held.shape if _is_all(held, first, stop) else [stop - first]
    return Out(key=_key(held, first, stop), shape=shape, tensor=held.tensor[first:stop])


def _dtype(held: Held) -> str:
    found = NAMES.get(held.tensor.dtype)
    if found is None:
        raise UsageError(
            f"{held.key or held.kind} {held.name} is {held.tensor.dtype}, which a checkpoint cannot hold",
            hint="Keep it as real numbers, or register the buffer with persistent=False.",
        )
    return found


def _number(name: str, key: str, value: Any) -> Number:
    dtype = None
    if isinstance(value, Tensor):
        dtype, value = NAMES.get(value.dtype), value.item()
        if dtype is None:
            raise UsageError(
                f"{key} of {name} is of a dtype that a checkpoint cannot hold",
                hint="Use an optimizer that keeps real numbers, integers or booleans.",
            )
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
    if value is not None and not isinstance(value, bool | int | float | str):
        raise UsageError(
            f"the optimizer keeps a {type(value).__name__} as {key} of {name}, which a checkpoint cannot hold",
            hint="It can hold tensors, numbers and texts.",
        )
    return Number(dtype=dtype, value=value)
