"""What a rank has of the training state, piece by piece: of weights, optimizer state and buffers, by name.

`Holdings` looks at the parts that train, and knows nothing of files. What several ranks hold alike (at level 0 over
dp, in groups, uncut weights over tp) has so many `holders`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from zero3d.assemble import Parts
from zero3d.checkpoint.manifest import Kind
from zero3d.checkpoint.slices import Part, Span, part_of, whole
from zero3d.comm.bucket import Piece
from zero3d.comm.mesh import Mesh
from zero3d.params import ParamInfo
from zero3d.zero.shard import Shard


class Stateful(Protocol):
    """An optimizer as checkpoints see it."""

    learning_rate: float

    @property
    def updates_whole(self) -> Mapping[str, bool]: ...
    def keys_of_state(self) -> Mapping[str, frozenset[str]]: ...
    def state_of(self, shard: Shard) -> Mapping[str, Mapping[str, Tensor]]: ...
    def whole_state(self) -> Mapping[str, Mapping[str, Tensor]]: ...
    def set_state_of(self, shard: Shard, states: Mapping[str, Mapping[str, Any]]) -> None: ...
    def set_whole_state(self, states: Mapping[str, Mapping[str, Any]]) -> None: ...
    def fetch(self) -> None: ...


@dataclass(frozen=True)
class Alike:
    """How many ranks hold the same, and which of them this one is."""

    holders: int = 1
    index: int = 0

    def times(self, other: "Alike") -> "Alike":
        return Alike(self.holders * other.holders, self.index * other.holders + other.index)


@dataclass(frozen=True, kw_only=True)
class Held:
    """Elements `span` of a tensor, flat in `tensor`. shape: of the whole tensor; dim: along which it is cut; shard:
    whose update changes them, if one does."""

    kind: Kind
    name: str
    key: str = ""
    shape: Sequence[int]
    dim: int | None
    span: Span
    tensor: Tensor
    alike: Alike
    counts: bool
    shard: Shard | None = None


class Holdings:
    """This rank's, of `parts` on `mesh`."""

    def __init__(self, parts: Parts, mesh: Mesh) -> None:
        self.parts = parts
        self.infos: Mapping[str, ParamInfo] = {info.name: info for info in parts.infos}
        self.optimizer: Stateful = parts.optimizer
        self._mesh = mesh
        sharding, dp, tp = mesh.sharding, mesh.axes["dp"], mesh.axes["tp"]
        self._all = Alike(dp.size, dp.index)
        self._groups = Alike(dp.size // sharding.size, mesh.hybrid.group if mesh.hybrid else 0)
        self._tp = Alike(tp.size, tp.index)

    def weights(self, *, trained_only: bool = False) -> Iterator[Held]:
        """Master weights of what is trained, and what the model computes with of what is not."""
        shards = [*self.parts.replica.shards, *(() if trained_only else self.parts.replica.frozen)]
        for shard in shards:
            for piece in shard.pieces:
                if piece.name:
                    values = shard.master[piece.start : piece.start + piece.numel]
                    yield self._held("weight", "", shard, piece, values)

    def states(self) -> Iterator[Held]:
        """Optimizer state that has elements."""
        for shard in self.parts.replica.shards:
            states = self.optimizer.state_of(shard)
            for piece in shard.pieces:
                for key, value in states.get(piece.name, {}).items() if piece.name else ():
                    if isinstance(value, Tensor) and value.dim():
                        yield self._held("state", key, shard, piece, value[: piece.numel])
        for name, state in self.optimizer.whole_state().items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    yield Held(
                        kind="state",
                        name=name,
                        key=key,
                        shape=tuple(value.shape),
                        dim=None,
                        span=Span(whole(value.shape), 0, value.numel()),
                        tensor=value.reshape(-1),
                        alike=self._groups.times(self._tp),
                        counts=self.parts.pipeline.placed.counts(name),
                    )

    def numbers(self) -> Iterator[tuple[str, str, Any]]:
        """(parameter, key, value) of optimizer state that has no elements."""
        states = [self.optimizer.state_of(shard) for shard in self.parts.replica.shards]
        for one in (*states, self.optimizer.whole_state()):
            for name, state in one.items():
                for key, value in state.items() if name else ():
                    if not isinstance(value, Tensor) or not value.dim():
                        yield name, key, value

    def buffers(self) -> Iterator[Held]:
        """Persistent ones: the first rank's of the stage that has them are everyone's."""
        mesh = self._mesh
        first = mesh.axes["dp"].index == mesh.axes["tp"].index == 0
        for name, buffer in self.buffer_names.items():
            owner = self.parts.pipeline.stages.rank_of_buffer(name) == mesh.axes["pp"].index
            yield Held(
                kind="buffer",
                name=name,
                shape=tuple(buffer.shape),
                dim=None,
                span=Span(whole(buffer.shape), 0, buffer.numel()),
                tensor=buffer.detach().reshape(-1),
                alike=Alike(),
                counts=first and owner,
            )

    @cached_property
    def buffer_names(self) -> dict[str, Tensor]:
        """Each persistent buffer once, by the first of its names."""
        found: dict[int, tuple[str, Tensor]] = {}
        for path, module in self.parts.model.named_modules():
            for attribute, buffer in module._buffers.items():
                if buffer is not None and attribute not in module._non_persistent_buffers_set:
                    found.setdefault(id(buffer), (f"{path}.{attribute}".lstrip("."), buffer))
        return dict(found.values())

    def part(self, name: str) -> Part:
        """What this rank's shards are pieces of."""
        info = self.infos[name]
        return part_of(info.shape, info.slicing, self._tp.index)

    def piece(self, shard: Shard, piece: Piece) -> Held:
        """The same as `weights` gives it."""
        return self._held("weight", "", shard, piece, shard.master[piece.start : piece.start + piece.numel])

    def _held(self, kind: Kind, key: str, shard: Shard, piece: Piece, values: Tensor) -> Held:
        slicing = self.infos[piece.name].slicing
        everywhere = shard.span.stop - shard.span.start == shard.bucket.numel
        over_tp = self._tp if slicing is None else Alike(slicing.copies, self._tp.index % slicing.copies)
        return Held(
            kind=kind,
            name=piece.name,
            key=key,
            shape=self.infos[piece.name].shape,
            dim=None if slicing is None else slicing.dim,
            span=Span(self.part(piece.name), piece.begin, piece.numel),
            tensor=values,
            alike=(self._all if everywhere else self._groups).times(over_tp),
            counts=self.parts.pipeline.placed.counts(piece.name),
            shard=shard,
        )
