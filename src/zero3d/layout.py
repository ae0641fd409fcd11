"""Rank arithmetic: where a rank stands on the axes dp, tp and pp.

rank = ((pp_index * dp) + dp_index) * tp + tp_index: tp neighbours are closest, pp farthest.

>>> layout = Layout(dp=2, tp=2, pp=2)
>>> layout.world
8
>>> layout.place(5)
Place(dp=0, tp=1, pp=1)
>>> layout.rank(Place(dp=0, tp=1, pp=1))
5
>>> layout.peers(5, "dp")
(5, 7)

With replicas ZeRO shards within groups of neighbours on dp:
dp_index = group * (dp / replicas) + index within the group.

>>> Layout(dp=4).groups(2)
((0, 1), (2, 3))
>>> Layout(dp=4).counterparts(2)
((0, 2), (1, 3))
>>> Layout(dp=4, tp=2).groups(2)
((0, 2), (4, 6), (1, 3), (5, 7))
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

AxisName = Literal["dp", "tp", "pp"]
AXES: tuple[AxisName, ...] = ("dp", "tp", "pp")


class Place(NamedTuple):
    """The index of one rank on each axis."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the three axes; `world` is their product."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"the {axis} axis has size {getattr(self, axis)}; sizes start at 1")

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    def place(self, rank: int) -> Place:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside 0 to {self.world - 1}")
        rest, tp_index = divmod(rank, self.tp)
        pp_index, dp_index = divmod(rest, self.dp)
        return Place(dp=dp_index, tp=tp_index, pp=pp_index)

    def rank(self, place: Place) -> int:
        return (place.pp * self.dp + place.dp) * self.tp + place.tp

    def peers(self, rank: int, axis: AxisName) -> tuple[int, ...]:
        """All ranks that differ from `rank` on `axis` alone, itself included, by index on the axis."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(**{axis: index})) for index in range(getattr(self, axis)))

    def groups(self, replicas: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group that shards among itself, by index within the group; `replicas` groups to a dp."""
        size = self._group_size(replicas)
        return tuple(line[start : start + size] for line in self._dp_lines() for start in range(0, self.dp, size))

    def counterparts(self, replicas: int) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same shards, by group."""
        size = self._group_size(replicas)
        return tuple(line[index::size] for line in self._dp_lines() for index in range(size))

    def model_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that share each replica of the model, pp outside tp; one group for each index on dp."""
        places = [[Place(dp, tp, pp) for pp in range(self.pp) for tp in range(self.tp)] for dp in range(self.dp)]
        return tuple(tuple(self.rank(place) for place in group) for group in places)

    def spread_over(self, hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tp groups that no machine has whole; hosts: the machine of each rank.

        >>> Layout(dp=2, tp=2).spread_over(["a", "b", "b", "b"])
        ((0, 1),)
        """
        groups = [self.peers(rank, "tp") for rank in range(0, self.world, self.tp)]
        return tuple(group for group in groups if len({hosts[rank] for rank in group}) > 1)

    def _group_size(self, replicas: int) -> int:
        if replicas < 1 or self.dp % replicas:
            raise ValueError(f"dp = {self.dp} cannot be cut into {replicas} equal groups")
        return self.dp // replicas

    def _dp_lines(self) -> list[tuple[int, ...]]:
        """The ranks of every dp axis, by index on it."""
        return sorted({self.peers(rank, "dp") for rank in range(self.world)})

    def with_dp_filling(self, world: int) -> "Layout":
        """The same tp and pp with dp = world / (tp * pp)."""
        rest = self.tp * self.pp
        if world % rest:
            raise ValueError(f"{world} ranks cannot be shared by tp * pp = {rest}")
        return replace(self, dp=world // rest)
