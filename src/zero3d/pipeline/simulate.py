"""A schedule on paper: when each action runs, how long ranks are idle, and whether it ends at all. Pure.

An action starts when its rank is free and what it needs is there:

    F(stage)   F(stage - 1)                  + the transfer, where that is another rank's
    B(stage)   B(stage + 1), or I            + the transfer
    I(stage)   as B
    W(stage)   I(stage), which is its own rank's

Transfers delay and occupy nobody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero3d.errors import ConfigError
from zero3d.pipeline.action import Action, Kind

Time = float | Sequence[float]
"""Of every stage alike, or one of each stage."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of one micro-batch, in any unit. A whole backward takes `input_backward` + `weight_backward`."""

    forward: Time = 1.0
    input_backward: Time = 1.0
    weight_backward: Time = 1.0
    transfer: float = 0.0
    """From one rank to another."""

    def of(self, action: Action) -> float:
        parts = {
            Kind.FORWARD: (self.forward,),
            Kind.BACKWARD: (self.input_backward, self.weight_backward),
            Kind.INPUT: (self.input_backward,),
            Kind.WEIGHT: (self.weight_backward,),
        }[action.kind]
        return sum(part if isinstance(part, int | float) else part[action.stage] for part in parts)


@dataclass(frozen=True)
class Run:
    """An action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank runs what, in order; in the unit of the costs."""

    ranks: Sequence[Sequence[Run]]

    @property
    def makespan(self) -> float:
        """From the start to the end of the last action of any rank."""
        return max((run.end for runs in self.ranks for run in runs), default=0.0)

    @property
    def ideal(self) -> float:
        """What the busiest rank computes: a step of ranks that never wait."""
        return max((sum(run.end - run.start for run in runs) for runs in self.ranks), default=0.0)

    @property
    def bubble(self) -> float:
        """(makespan - ideal) / ideal: (p - 1)/m for GPipe and 1F1B of p equal stages and m micro-batches."""
        return (self.makespan - self.ideal) / self.ideal if self.ideal else 0.0

    @property
    def longest(self) -> float:
        """The longest time between a rank's own first start and last end."""
        return max((runs[-1].end - runs[0].start for runs in self.ranks if runs), default=0.0)

    @property
    def bubble_rate(self) -> float:
        """(longest - ideal) / longest: idle over all, as Qi et al. 2023 count it."""
        return (self.longest - self.ideal) / self.longest if self.longest else 0.0


def simulate(ranks: Sequence[Sequence[Action]], costs: Costs = Costs()) -> Timeline:
    """When each action of a legal schedule (`legal.check`) runs.

    Raises `ConfigError` that names the actions which wait for each other, where ranks would wait for ever.
    """
    rank_of = {action: rank for rank, actions in enumerate(ranks) for action in actions}
    last_stage = max((action.stage for action in rank_of), default=0)
    ends: dict[Action, float] = {}
    runs: list[list[Run]] = [[] for _ in ranks]
    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(ranks):
            while len(runs[rank]) < len(actions):
                action = actions[len(runs[rank])]
                needed = _needed(action, last_stage, rank_of)
                if needed is not None and needed not in ends:
                    break
                free = runs[rank][-1].end if runs[rank] else 0.0
                there = _arrival(needed, rank, rank_of, ends, costs.transfer)
                start = max(free, there)
                ends[action] = start + costs.of(action)
                runs[rank].append(Run(action, start, ends[action]))
                moving = True
    if len(ends) < len(rank_of):
        stuck = {rank: actions[len(runs[rank])] for rank, actions in enumerate(ranks) if len(runs[rank]) < len(actions)}
        raise _deadlock(stuck, {rank: _needed(action, last_stage, rank_of) for rank, action in stuck.items()}, rank_of)
    return Timeline(runs)


def peak_live(ranks: Sequence[Sequence[Action]]) -> list[int]:
    """The most activations that each rank holds at a time, whatever actions cost.

    An activation, of one micro-batch in one stage, is live from the start of its F to the end of its B, or of its W
    where the backward is split. A rank of v stages counts them in each: v of them are one micro-batch of its part of
    the model.
    """
    return [_peak(actions) for actions in ranks]


def _peak(actions: Sequence[Action]) -> int:
    live = peak = 0
    for action in actions:
        live += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT))
        peak = max(peak, live)
    return peak


def _needed(action: Action, last_stage: int, known: Mapping[Action, int]) -> Action | None:
    """What must end before `action` may start, beside the action before it on its rank."""
    stage, index = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        return Action(Kind.FORWARD, stage - 1, index) if stage else None
    if action.kind is Kind.WEIGHT:
        return Action(Kind.INPUT, stage, index)
    if stage == last_stage:
        return Action(Kind.FORWARD, stage, index)
    whole = Action(Kind.BACKWARD, stage + 1, index)
    return whole if whole in known else Action(Kind.INPUT, stage + 1, index)


def _arrival(
    needed: Action | None, rank: int, rank_of: Mapping[Action, int], ends: Mapping[Action, float], transfer: float
) -> float:
    if needed is None:
        return 0.0
    return ends[needed] + (transfer if rank_of[needed] != rank else 0.0)


def _deadlock(
    stuck: Mapping[int, Action], needed: Mapping[int, Action | None], rank_of: Mapping[Action, int]
) -> ConfigError:
    """`stuck`: the action that each rank cannot start. Some of these wait for each other in a circle."""
    circle = [next(iter(stuck))]
    while True:
        missing = needed[circle[-1]]
        assert missing is not None and missing in rank_of, "the schedule is not legal"
        rank = rank_of[missing]
        if rank in circle:
            circle = circle[circle.index(rank) :]
            break
        circle.append(rank)
    told = []
    for rank in circle:
        missing = needed[rank]
        assert missing is not None
        other = stuck[rank_of[missing]]
        behind = "" if other == missing else f", which comes after {other.full} there"
        told.append(f"rank {rank} waits at {stuck[rank].full} for {missing.full} of rank {rank_of[missing]}{behind}")
    return ConfigError(
        f"the schedule never ends: {'; '.join(told)}",
        hint="Move the action that is waited for before the one that waits on its rank.",
    )
