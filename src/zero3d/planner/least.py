"""Where nothing fits: the least that would. Pure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from zero3d.planner.choice import Choice, divisors, ways_to_keep
from zero3d.planner.footprint import Footprint
from zero3d.planner.judge import Aim, fits, impossible

TIMES = (2, 4, 8, 16, 32, 64)
"""So many times as many devices, and as short samples, are tried."""
FEWEST_TOKENS = 16


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

    @property
    def lasting(self) -> int:
        """Bytes of a device that are held however short samples are."""
        return sum(self.footprint.by_kind[kind] for kind in LASTING)


LASTING = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Least:
    """Where nothing fits. None where no layout can be.

    smallest: what takes the least of the host, of what a device has room for; of a device, where it has room for
    nothing or all of this fits. in_host: what takes the least of a device, of what the host has room for. ways: (what
    would do, the plan that does) for more devices and for shorter sequences
    """

    smallest: Smallest | None
    in_host: Smallest | None
    ways: tuple[tuple[str, Smallest], ...]


def least(aim: Aim, shorter: Callable[[int], Aim], sequence: int) -> Least:
    """shorter: the same for so many tokens a sample, of which there are `sequence`."""
    small = [_small(aim, choice) for choice in _choices(aim)]
    fewer = _shorter(aim, small, shorter, sequence)
    return Least(
        smallest=_smallest(small),
        in_host=min((one for one in small if one.fits_host), key=lambda one: one.footprint.total, default=None),
        ways=tuple(way for way in (_more(aim), fewer) if way is not None),
    )


def _smallest(small: Iterable[Smallest]) -> Smallest | None:
    def need(one: Smallest) -> tuple[int, float]:
        if one.fits:
            return 0, one.footprint.total
        return (1, one.host_bytes) if one.fits_device else (2, one.footprint.total)

    return min(small, key=need, default=None)


def _more(aim: Aim) -> tuple[str, Smallest] | None:
    """The fewest devices that would do, of twice, four times ... as many."""
    for times in TIMES:
        batch = aim.global_batch if aim.global_batch % (aim.devices * times) == 0 else aim.global_batch * times
        cluster = aim.cluster.with_changes(per_node=min(aim.machine, aim.devices * times))
        more = replace(aim, devices=aim.devices * times, global_batch=batch, cluster=cluster)
        found = _smallest(_small(more, choice) for choice in _choices(more))
        if found is not None and found.fits:
            told = "" if batch == aim.global_batch else f", with a global batch of {batch}"
            return f"{more.devices} devices{told}", found
    return None


def _shorter(
    aim: Aim, small: Iterable[Smallest], shorter: Callable[[int], Aim], sequence: int
) -> tuple[str, Smallest] | None:
    """The longest samples that would do, of half, a quarter ... of the tokens. A model is counted for each, so only
    what has room for all that lasts is looked at."""
    choices = [one.choice for one in small if one.fits_host and one.lasting <= aim.memory]
    for times in TIMES if choices else ():
        if sequence // times < FEWEST_TOKENS:
            break
        fewer = shorter(sequence // times)
        found = _smallest(_small(fewer, choice) for choice in choices)
        if found is not None and found.fits:
            return f"sequences of {sequence // times} tokens", found
    return None


def _small(aim: Aim, choice: Choice) -> Smallest:
    device = aim.cluster.device.model_copy(update={"memory": inf})
    roomy = replace(aim, cluster=aim.cluster.with_changes(device=device), host_memory=inf)
    no_host = replace(roomy, host_memory=0.0)  # What is refused for its host is told with the most that one takes.
    most, _ = fits(roomy, choice)
    host = 0.0 if choice.offload == "none" else fits(no_host, choice)[0].host_bytes
    return Smallest(
        choice=choice,
        footprint=most,
        host_bytes=host,
        fits_device=most.total <= aim.memory,
        fits_host=host <= aim.host_of_rank,
    )


def _choices(aim: Aim) -> Iterator[Choice]:
    """One sample at a time, recomputed, at level 3, of all layouts."""
    for layout in _layouts(aim):
        for way in ways_to_keep(layout.dp):
            if layout.dp > 1 and (way["level"] != 3 or way.get("reduce") != "micro-batch" or way.get("keep_gathered")):
                continue
            yield layout.changed(recompute="block" if aim.blocks else "none", **way)


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
