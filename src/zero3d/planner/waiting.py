"""How long a pipeline takes for a step, by the simulator; of many micro-batches only some are simulated. Pure.

Once a pipeline is full each further round of micro-batches takes as long as the one before: from two simulations, one
of them a round longer, follows the time of any number.
"""

from collections.abc import Mapping
from functools import lru_cache

from zero3d.pipeline.action import Action
from zero3d.pipeline.schedules.own import find
from zero3d.pipeline.simulate import Costs, simulate

ROUNDS, ROUNDS_OF_SEVERAL = 2, 4
"""Rounds of as many micro-batches as ranks that fill the pipeline and empty it; with several stages a rank. From then
on rounds differ by less than 0.4 %."""

IDLE: Mapping[str, tuple[float, float, float]] = {
    "1f1b": (1, 1, 1),
    "zbh1": (1, 1, -1),
    "zbh2": (1, 0, 0),
    "zbv": (1, 0, 0),
}
"""Of (forward, backward of inputs, gradients of weights): what a rank is idle for each rank but one (Qi et al. 2023,
section 2.3; Narayanan et al. 2021, section 2.2, for others). The last two leave what the first forward takes to come
to the last rank."""
SENT: Mapping[str, float] = {"1f1b": 2.0}
"""Messages that each micro-batch waits for where a rank has no other to turn to."""


def makespan(
    schedule: str,
    ranks: int,
    micro_batches: int,
    forward: tuple[float, ...],
    input_backward: tuple[float, ...],
    weight_backward: tuple[float, ...],
    transfer: float,
) -> float:
    """Seconds from the first action to the last; times are of one micro-batch in each stage.

    Raises `ConfigError` for numbers that the schedule is not for.
    """
    if ranks == 1 and len(forward) == 1:
        return micro_batches * (forward[0] + input_backward[0] + weight_backward[0])
    costs = (forward, input_backward, weight_backward, transfer)
    base = (ROUNDS if len(forward) == ranks else ROUNDS_OF_SEVERAL) * ranks + micro_batches % ranks
    if micro_batches <= base + ranks:
        return _simulated(schedule, ranks, micro_batches, *costs)
    shorter, longer = (_simulated(schedule, ranks, base + more, *costs) for more in (0, ranks))
    return longer + (longer - shorter) * (micro_batches - base - ranks) / ranks


def rough(
    schedule: str,
    ranks: int,
    micro_batches: int,
    forward: tuple[float, ...],
    input_backward: tuple[float, ...],
    weight_backward: tuple[float, ...],
    transfer: float,
) -> float:
    """The same by formulas for stages that take about as long as each other, a thousand times faster: for sorting out
    layouts before the rest are simulated. A schedule of the user's own is taken to be as 1f1b."""
    per_rank = len(forward) // ranks
    totals = [sum(times) for times in zip(forward, input_backward, weight_backward)]
    placed = find(schedule).placement(len(forward), ranks) if ranks > 1 else [range(len(forward))]
    busiest = max(placed, key=lambda stages: sum(totals[stage] for stage in stages))
    parts = [sum(times[stage] for stage in busiest) for times in (forward, input_backward, weight_backward)]
    shares = IDLE.get(schedule, IDLE["1f1b"])
    idle = sum(share * part for share, part in zip(shares, parts)) / per_rank
    waits = idle + 2 * transfer * per_rank
    return (
        micro_batches * sum(parts) + (ranks - 1) * max(waits, 0.0) + SENT.get(schedule, 0.0) * transfer * micro_batches
    )


@lru_cache(maxsize=4096)
def _simulated(
    schedule: str,
    ranks: int,
    micro_batches: int,
    forward: tuple[float, ...],
    input_backward: tuple[float, ...],
    weight_backward: tuple[float, ...],
    transfer: float,
) -> float:
    actions = _actions(schedule, len(forward), ranks, micro_batches)
    costs = Costs(forward=forward, input_backward=input_backward, weight_backward=weight_backward, transfer=transfer)
    return simulate(actions, costs).makespan


@lru_cache(maxsize=64)
def _actions(schedule: str, stages: int, ranks: int, micro_batches: int) -> list[list[Action]]:
    return find(schedule).actions(stages, ranks, micro_batches)
