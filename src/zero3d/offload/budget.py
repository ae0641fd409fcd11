"""The plan of host memory: what leaves the device, what that takes on the host, and whether it is there. Pure.

A rank has n offloaded elements; w are the bytes of a weight, g of a held gradient, d of one that travels down, M the
number of moments, L the largest shard and B the two largest together:

                home: host      disk
    master      4 n             4 B, and 4 n on disk
    moments     4 M n           4 M B, and 4 M n on disk
    gradients   g n             g n                         twice where the update is delayed
    weights     w n             w n                         with offload.parameters = "host" alone
    staging     2 (d + w) L     2 (d + w) L                 two buffers a direction; pinned on a GPU machine; 2 d L
                                                            with offload.parameters = "host"

>>> fp16 = HostWidths(gradient=2)
>>> one = need([(1000, fp16), (3000, fp16)])
>>> one.master + one.moments, one.gradients, one.staging
(48000, 8000, 24000)
>>> choose([100, 100, 100, 100], 0.3)
[2, 3]
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from zero3d.errors import ConfigError

MASTER = MOMENT = 4
"""Bytes: both are fp32."""
MOST_SIZES = 4
"""Different needs of ranks that an error spells out."""
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@dataclass(frozen=True, kw_only=True)
class HostWidths:
    """Bytes an element takes.

    weight: what the model computes with, and travels up; gradient: as it is held; down: as it travels down; moments:
    how many tensors of the shard's size the optimizer keeps; apart: on the host the master weights are not the weights
    themselves, as fp32 ones may be
    """

    weight: int = 2
    gradient: int = 4
    down: int = 2
    moments: int = 2
    apart: bool = True


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """Bytes that one rank takes in its machine's memory, by kind; `disk`: and in its files. pins: staging is pinned."""

    master: int
    moments: int
    gradients: int
    weights: int
    staging: int
    disk: int = 0
    pins: bool = False

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def pinned(self) -> int:
        """Of the total."""
        return self.staging if self.pins else 0

    @property
    def kinds(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("master", "moments", "gradients", "weights", "staging")}

    @property
    def held(self) -> dict[str, int]:
        """By the kinds of `held_bytes`: staging apart from the host's."""
        if self.disk:
            return {"host": self.gradients + self.weights, "disk": self.disk, "staging": self.staging}
        return {"host": self.total - self.staging, "disk": 0, "staging": self.staging}


@dataclass(frozen=True, kw_only=True)
class MachineNeed:
    """What the ranks of one machine need of its memory; needs: by rank. available: bytes of it that were free before,
    of which `limit_name` leaves no more; None: nobody knows."""

    needs: Mapping[int, HostNeed]
    available: int | None = None
    limit_name: str = ""

    @property
    def total(self) -> int:
        return sum(one.total for one in self.needs.values())


def need(
    shards: Iterable[tuple[int, HostWidths]],
    *,
    home: Literal["host", "disk"] = "host",
    parameters: Literal["device", "host"] = "device",
    delayed: bool = False,
    pins: bool = False,
    other_weights: int = 0,
) -> HostNeed:
    """What one rank's offloaded `shards` take: of each its elements with padding, and their widths.

    delayed: gradients of one step are read while those of the next arrive; pins: the device is a GPU; other_weights:
    bytes of shards whose weights alone live on the host: frozen ones, and those whose optimizer stays on the device
    """
    shards = list(shards)
    master = [MASTER * elements for elements, _ in shards]
    moments = [MOMENT * widths.moments * elements for elements, widths in shards]
    # Weights that live on the host go up from where they are.
    up = [widths.weight * elements for elements, widths in shards if parameters == "device"]
    weights = [
        widths.weight * elements
        for elements, widths in shards
        if parameters == "host" and (widths.apart or home == "disk")
    ]
    on_disk = home == "disk"
    return HostNeed(
        master=_two_largest(master) if on_disk else sum(master),
        moments=_two_largest(moments) if on_disk else sum(moments),
        gradients=(2 if delayed else 1) * sum(widths.gradient * elements for elements, widths in shards),
        weights=sum(weights) + other_weights,
        staging=2 * _taken(max((widths.down * elements for elements, widths in shards), default=0), pins)
        + 2 * _taken(max(up, default=0), pins),
        disk=sum(master) + sum(moments) if on_disk else 0,
        pins=pins,
    )


def _taken(size: int, pins: bool) -> int:
    """torch's allocator gives pinned memory in powers of two."""
    return 1 << (size - 1).bit_length() if pins and size else size


def _two_largest(sizes: Sequence[int]) -> int:
    """One bucket is updated while the next is read or the last is written."""
    return sum(sorted(sizes)[-2:])


def check(needs: Mapping[int, HostNeed], available: int, limit_name: str) -> None:
    """Raises `ConfigError`, with the sum, if the ranks of one machine need more than the `available` bytes.

    needs: by rank; limit_name: what leaves no more, such as "cgroup limit"
    """
    total = sum(one.total for one in needs.values())
    if total <= available:
        return
    ways = ["more machines, of which each then holds less (more ranks on this one share the same sum)"]
    if available >= 0.01 * total:
        ways.append(
            f"a lower offload.fraction, about {available / total:.2f} of what it is, where the device has room for the "
            "rest"
        )
    if not any(one.disk for one in needs.values()):
        ways.append('offload.optimizer = "disk"')
    raise ConfigError(
        f"host memory: {_sum(needs)}; this machine has {_in(_unit(available), available)} free ({limit_name})",
        hint=f"Use {'; or '.join(ways)}.",
        where="offload.optimizer",
    )


def report(needs: Mapping[int, HostNeed], available: int | None = None, limit_name: str = "") -> str:
    """One line for the start of a run: bytes of the ranks of one machine on their host, each and together."""
    disk = sum(one.disk for one in needs.values())
    parts = [f"host memory: {_sum(needs)}"]
    if available is not None:
        parts.append(f"{_in(_unit(available), available)} were free ({limit_name})")
    if disk:
        parts.append(f"{_in(_unit(disk), disk)} on disk")
    return "; ".join(parts)


def choose(
    elements: Sequence[int],
    fraction: float | Literal["auto"],
    *,
    offloaded: float = 0.0,
    kept: float = 0.0,
    budget: float = 0.0,
    besides: int = 0,
) -> list[int]:
    """Which buckets go to their home: the last ones, as their gradients come first in backward.

    elements: of each bucket, in the model's order. fraction: as many as reach this part of all elements; "auto": the
    fewest with which the device holds at most `budget` bytes of model states, where an element takes `offloaded` or
    `kept` bytes of it, and others (frozen weights) take `besides`. Raises `ConfigError` with the sum if all buckets are
    too few.
    """
    total, gone, first = sum(elements), 0, len(elements)

    def enough() -> bool:
        if fraction == "auto":
            return round(offloaded * gone + kept * (total - gone) + besides) <= round(budget)
        return gone >= max(fraction * total - 0.5, 1)  # Elements are whole numbers, and the product is not exact.

    while not enough() and first:
        first -= 1
        gone += elements[first]
    if fraction == "auto" and not enough():
        least = offloaded * total + besides
        unit = _unit(least)
        others = f", and {_in(unit, besides)} of others" if besides else ""
        raise ConfigError(
            f"offload.device_mb = {budget / 1e6:g} is less than what stays on the device with all {len(elements)} "
            f"buckets offloaded: {total:,} elements x {offloaded:g} bytes{others} = {_in(unit, least)}",
            hint=f"Set offload.device_mb to {ceil(least / 1e6)} or more. A higher zero.level, more dp ranks or, at "
            'level 3, offload.parameters = "host" leave less on the device.',
            where="offload.device_mb",
        )
    return list(range(first, len(elements)))


def _sum(needs: Mapping[int, HostNeed]) -> str:
    """Such as `4 ranks need 4 x 12.0 GB (master 4.0, moments 8.0) = 48.0 GB, of which 0.2 GB pinned`."""
    total, pinned = (sum(getattr(one, name) for one in needs.values()) for name in ("total", "pinned"))
    unit = _unit(total)
    equal = sorted(Counter(needs.values()).items(), key=lambda found: -found[0].total)
    spelt, others = equal[:MOST_SIZES], equal[MOST_SIZES:]
    terms = []
    for one, times in spelt:
        kinds = ", ".join(f"{kind} {size / unit[1]:.1f}" for kind, size in one.kinds.items() if size)
        terms.append((f"{times} x " if times > 1 else "") + _in(unit, one.total) + (f" ({kinds})" if kinds else ""))
    if others:
        left = sum(one.total * times for one, times in others)
        terms.append(f"{_in(unit, left)} of {sum(times for _, times in others)} others")
    text = f"{len(needs)} ranks need " if len(needs) != 1 else "1 rank needs "
    text += " + ".join(terms) + (f" = {_in(unit, total)}" if len(needs) > 1 else "")
    return text + (f", of which {_in(_unit(pinned), pinned)} pinned" if pinned else "")


def _unit(num_bytes: float) -> tuple[str, float]:
    """One for all terms of a sum, so that they can be added up."""
    return next((unit for unit in UNITS if num_bytes >= unit[1]), ("B", 1.0))


def _in(unit: tuple[str, float], num_bytes: float) -> str:
    return f"{num_bytes / unit[1]:.1f} {unit[0]}" if unit[1] > 1 else f"{num_bytes:.0f} {unit[0]}"
