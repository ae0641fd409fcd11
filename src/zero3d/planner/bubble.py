"""How long pipeline ranks wait for each other in a step of a configuration, by the simulator. Pure.

Every stage is taken to compute as long as every other, and a forward as long as each of the two parts of a backward.
"""

from collections.abc import Sequence

from zero3d.config import Config
from zero3d.errors import ConfigError
from zero3d.pipeline.action import Action
from zero3d.pipeline.schedules.own import find
from zero3d.pipeline.simulate import simulate

TOLERABLE = 0.5
"""A bubble above it is worth a word: ranks are idle for more than a third of the step."""


def num_stages(config: Config) -> int:
    """Of the whole pipeline."""
    return config.parallel.pp * config.parallel.stages_per_rank


def actions(config: Config, micro_batches: int | None = None) -> list[list[Action]]:
    """What each index on pp does in a step of the resolved `config`, or of one of so many micro-batches.

    Raises `ConfigError` that names the keys, for numbers that the schedule is not for.
    """
    parallel = config.parallel
    chosen = find(parallel.schedule)
    count = config.micro_batches if micro_batches is None else micro_batches
    try:
        return chosen.actions(num_stages(config), parallel.pp, count)
    except ConfigError as error:
        raise ConfigError(
            f"parallel.schedule = {parallel.schedule!r}, pp = {parallel.pp}, stages_per_rank = "
            f"{parallel.stages_per_rank}: {error.message}",
            hint=_way_out(config, chosen.stages_per_rank) or error.hint,
        ) from None


def bubble(config: Config, micro_batches: int | None = None) -> float:
    """(time of a step - what the busiest rank computes) / what it computes; 0 without a pipeline."""
    return simulate(actions(config, micro_batches)).bubble


def notice(config: Config) -> str:
    """What to say where ranks are idle for long; nothing where they are not. `config`: resolved."""
    found = bubble(config)
    if found <= TOLERABLE:
        return ""
    count, schedule = config.micro_batches, config.parallel.schedule
    told = (
        f"{count} micro-batch{'es' * (count > 1)} on pp = {config.parallel.pp} with {schedule}: a step takes "
        f"{found:.0%} longer than what a rank computes in it."
    )
    return f"{told} {_better(config)}".rstrip()


def _better(config: Config) -> str:
    """A smaller micro-batch that makes more of them, if there is one that helps."""
    parallel = config.parallel
    if parallel.schedule.endswith(".txt"):  # Made for its number of micro-batches alone.
        return ""
    assert parallel.dp != "auto" and parallel.micro_batch is not None, "resolved"
    mine = config.data.global_batch // parallel.dp
    sizes: Sequence[int] = [size for size in range(parallel.micro_batch - 1, 0, -1) if mine % size == 0]
    if not sizes:
        return "More samples in a step (data.global_batch) would make more micro-batches."
    bubbles = {size: bubble(config, mine // size) for size in sizes}
    size = next((size for size in sizes if bubbles[size] <= TOLERABLE), sizes[-1])
    return f"With parallel.micro_batch = {size} there are {mine // size}, and it takes {bubbles[size]:.0%} longer."


def _way_out(config: Config, stages_per_rank: int | None) -> str:
    """Where the schedule can do one number of stages a rank alone, and that is what is wrong."""
    if stages_per_rank is None or stages_per_rank == config.parallel.stages_per_rank:
        return ""
    others = ' or parallel.schedule = "interleaved"' if stages_per_rank == 1 else ""
    return f"Set parallel.stages_per_rank = {stages_per_rank}{others}."
