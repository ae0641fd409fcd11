"""The schedules by name, where each puts its stages, and which numbers it can do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from zero3d.errors import ConfigError
from zero3d.pipeline.action import Action, Kind
from zero3d.pipeline.schedules.accumulate import accumulate
from zero3d.pipeline.schedules.gpipe import gpipe
from zero3d.pipeline.schedules.interleaved import interleaved
from zero3d.pipeline.schedules.one_f_one_b import one_f_one_b
from zero3d.pipeline.schedules.placement import Placement, in_a_v, in_turn
from zero3d.pipeline.schedules.zero_bubble import zbh1, zbh2
from zero3d.pipeline.schedules.zero_bubble_v import zbv


@dataclass(frozen=True, kw_only=True)
class Named:
    """A schedule, with what it needs. `stages_per_rank`: the only number it can do, None for any."""

    name: str
    make: Callable[[int, int, int], list[list[Action]]]
    """(stages, ranks, micro-batches) -> the actions of each rank, in order."""
    placement: Placement = in_turn
    stages_per_rank: int | None = 1
    most_ranks: int | None = None

    def actions(self, stages: int, ranks: int, micro_batches: int) -> list[list[Action]]:
        """The actions of each rank, in order. Raises `ConfigError` for numbers that `check` refuses."""
        self.check(stages, ranks, micro_batches)
        return self.make(stages, ranks, micro_batches)

    def check_stages(self, stages: int, ranks: int) -> None:
        """`check`, where the number of micro-batches is not known yet."""
        self.check(stages, ranks, ranks)

    def splits_backward(self, stages: int, ranks: int) -> bool:
        """Whether gradients of weights are actions of their own."""
        return any(action.kind is Kind.WEIGHT for action in self.actions(stages, ranks, ranks)[0])

    def usual_ranks(self, stages: int) -> int:
        """How many ranks `stages` stages are for, where nobody says: two stages a rank where any number will do."""
        return max(stages // (self.stages_per_rank or 2), 1)

    def check(self, stages: int, ranks: int, micro_batches: int) -> None:
        """Raises `ConfigError`, with numbers that would work, for those that would not."""
        for count, what in ((stages, "stages"), (ranks, "ranks"), (micro_batches, "micro-batches")):
            if count < 1:
                raise ConfigError(f"{count} {what}", hint=f"The number of {what} must be at least 1.")
        if self.most_ranks is not None and ranks > self.most_ranks:
            others = ", ".join(name for name, one in SCHEDULES.items() if one.most_ranks is None)
            raise ConfigError(f"{self.name} is for one rank, not {ranks}", hint=f"For several there are {others}.")
        if self.stages_per_rank is not None and stages != self.stages_per_rank * ranks:
            raise ConfigError(
                f"{self.name} has {_times(self.stages_per_rank, 'stage')} a rank, and {_times(stages, 'stage')} on "
                f"{_times(ranks, 'rank')} are not that",
                hint=self._ways_out(stages, ranks, self.stages_per_rank),
            )
        if stages % ranks:
            below = stages // ranks * ranks
            numbers = [str(number) for number in (below, below + ranks) if number]
            raise ConfigError(
                f"{self.name} has as many stages on each rank, and {stages} cannot be dealt out to {ranks} ranks",
                hint=f"Use {' or '.join(numbers)} stages, or {_divisors(stages)} ranks.",
            )

    def _ways_out(self, stages: int, ranks: int, per_rank: int) -> str:
        ways = [f"{_times(per_rank * ranks, 'stage')} on {_times(ranks, 'rank')}"]
        if self.most_ranks is None and stages % per_rank == 0:
            ways.append(f"{_times(stages, 'stage')} on {_times(stages // per_rank, 'rank')}")
        told = f"Use {' or '.join(ways)}."
        if self.most_ranks is None and stages > ranks and stages % ranks == 0:
            told += f" interleaved has {stages // ranks} stages a rank."
        return told


SCHEDULES: Mapping[str, Named] = {
    one.name: one
    for one in (
        Named(name="accumulate", make=accumulate, most_ranks=1),
        Named(name="gpipe", make=gpipe),
        Named(name="1f1b", make=one_f_one_b),
        Named(name="interleaved", make=interleaved, stages_per_rank=None),
        Named(name="zbh1", make=zbh1),
        Named(name="zbh2", make=zbh2),
        Named(name="zbv", make=zbv, placement=in_a_v, stages_per_rank=2),
    )
}


def named(name: str) -> Named:
    """The schedule of that name. Raises `ConfigError` with the names there are."""
    if name not in SCHEDULES:
        near = get_close_matches(name.lower(), SCHEDULES, n=1)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"there is no schedule {name!r}",
            hint=f"{meant}There are {', '.join(SCHEDULES)}, and files of your own that end in .txt.",
        )
    return SCHEDULES[name]


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _divisors(number: int) -> str:
    found = [str(one) for one in range(1, number + 1) if number % one == 0]
    return " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))
