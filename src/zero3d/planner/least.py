"""Where nothing fits: the least that would. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zero3d.planner.choice import Choice, divisors, ways_to_keep
from zero3d.planner.footprint import Footprint
from zero3d.planner.judge import Aim, fits, impossible

MOST = 64
"""Times as many devices, or as short a sequence, that are tried."""


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The choice that takes the least of a device, whatever it takes of its host."""

    choice: Choice
    footprint: Footprint
    fits: bool
    fits_host: bool


def smallest(aim: Aim) -> Smallest | None:
    """One sample at a time, recomputed, at level 3, of all layouts; None where no layout can be."""
    found: list[Smallest] = []
    for layout in _layouts(aim):
        for way in ways_to_keep(layout.dp):
            if layout.dp > 1 and (way["level"] != 3 or way.get("reduce") != "micro-batch" or way.get("keep_gathered")):
                continue
            choice = layout.changed(recompute="block" if aim.blocks else "none", **way)
            footprint, refused = fits(aim, choice)
            host = footprint.host_bytes <= aim.host_of_rank
            found.append(Smallest(choice=choice, footprint=footprint, fits=refused is None, fits_host=host))
    return min(found, key=lambda one: (not one.fits, one.footprint.total), default=None)


def ways_out(aim: Aim, shorter: Callable[[int], Aim], sequence: int) -> Iterator[tuple[str, Smallest]]:
    """(what would do, the plan that does) for more devices and for shorter sequences; shorter: the same for so many
    tokens a sample."""
    times = 2
    while times <= MOST:
        batch = aim.global_batch if aim.global_batch % (aim.devices * times) == 0 else aim.global_batch * times
        cluster = aim.cluster.with_changes(per_node=min(aim.machine, aim.devices * times))
        more = replace(aim, devices=aim.devices * times, global_batch=batch, cluster=cluster)
        found = smallest(more)
        if found is not None and found.fits:
            told = "" if batch == aim.global_batch else f", with a global batch of {batch}"
            yield f"{more.devices} devices{told}", found
            break
        times *= 2
    times = 2
    while times <= MOST and sequence // times >= 16:
        found = smallest(shorter(sequence // times))
        if found is not None and found.fits:
            yield f"sequences of {sequence // times} tokens", found
            break
        times *= 2


def _layouts(aim: Aim) -> Iterator[Choice]:
    for tp in divisors(aim.devices):
        if tp > aim.cluster.per_node:
            break
        for pp in divisors(aim.devices // tp):
            dp = aim.devices // (tp * pp)
            samples = max(aim.global_batch // dp, 1)
            choice = Choice(dp=dp, tp=tp, pp=pp, samples=samples, micro_batch=1, sequence_parallel=tp > 1)
            if impossible(aim, choice) is None:
                yield choice
