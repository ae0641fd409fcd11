"""Where nothing fits: the least that would. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf

from zero3d.planner.choice import Choice, divisors, ways_to_keep
from zero3d.planner.footprint import Footprint
from zero3d.planner.judge import Aim, fits, impossible

MOST = 64
"""Times as many devices, or as short a sequence, that are tried."""


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """A choice that takes little. footprint: of the rank that takes the most of its device; host_bytes: of the one that
    takes the most of its host"""

    choice: Choice
    footprint: Footprint
    host_bytes: float
    fits_device: bool
    fits_host: bool

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host


def smallest(aim: Aim) -> Smallest | None:
    """What takes the least of the host, of what a device has room for; of a device, where it has room for nothing or
    all of this fits. None where no layout can be."""

    def need(one: Smallest) -> tuple[int, float]:
        if one.fits:
            return 0, one.footprint.total
        return (1, one.host_bytes) if one.fits_device else (2, one.footprint.total)

    return min(_small(aim), key=need, default=None)


def smallest_in_host(aim: Aim) -> Smallest | None:
    """What takes the least of a device, of what the host has room for."""
    return min((one for one in _small(aim) if one.fits_host), key=lambda one: one.footprint.total, default=None)


def _small(aim: Aim) -> Iterator[Smallest]:
    """One sample at a time, recomputed, at level 3, of all layouts."""
    device = aim.cluster.device.model_copy(update={"memory": inf})
    roomy = replace(aim, cluster=aim.cluster.with_changes(device=device), host_memory=inf)
    no_host = replace(roomy, host_memory=0.0)  # What is refused for its host is told with the most that one takes.
    for layout in _layouts(aim):
        for way in ways_to_keep(layout.dp):
            if layout.dp > 1 and (way["level"] != 3 or way.get("reduce") != "micro-batch" or way.get("keep_gathered")):
                continue
            choice = layout.changed(recompute="block" if aim.blocks else "none", **way)
            most, _ = fits(roomy, choice)
            host = 0.0 if choice.offload == "none" else fits(no_host, choice)[0].host_bytes
            yield Smallest(
                choice=choice,
                footprint=most,
                host_bytes=host,
                fits_device=most.total <= aim.memory,
                fits_host=host <= aim.host_of_rank,
            )


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
