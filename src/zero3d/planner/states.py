"""The buckets of a rank, and what lives over steps: model states to the byte, wherever their home is. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zero3d.comm.bucket import Asking, Bucket, Want, plan_units, quarter, sliver
from zero3d.offload.budget import HostNeed, HostWidths, choose, need
from zero3d.planner.keeping import DTYPES, Keeping, Place
from zero3d.planner.workload import Parameter, Workload

JOINED = {0: quarter, 1: quarter, 2: sliver, 3: sliver}
"""As `zero.levels` has it."""


@dataclass(frozen=True)
class Held:
    """Buckets of a rank in the model's order. units: of parts (numbers) the buckets that they use; outside: used by all
    of a forward; shared: of several units; tied: parameters that other stages hold too."""

    buckets: Sequence[Bucket]
    units: Mapping[int, Sequence[Bucket]]
    outside: Sequence[Bucket]
    shared: frozenset[Bucket]
    tied: Sequence[Bucket]


@dataclass(frozen=True)
class Lasting:
    """Bytes that live over steps. host: by kind, as `offload.budget` has it."""

    weights: int
    gradients: int
    optimizer: int
    counters: int
    host: HostNeed | None = None
    away: frozenset[Bucket] = field(default=frozenset())


def named(place: Place, parameter: Parameter) -> str:
    """Unique in the model."""
    return f"{place.number}:{parameter.name}" if place.block else parameter.name


def held_by(workload: Workload, keeping: Keeping, places: Sequence[Place]) -> Held:
    """The buckets of a rank that has these parts."""
    asking, users, seen = [], {}, set()
    tied = {one.name for one in workload.after.borrowed} if keeping.pp > 1 else set()
    for place in places:
        units: dict[str, list[Want]] = {}
        wanted = [*place.part.borrowed, *place.part.parameters] if keeping.pp > 1 else place.part.parameters
        for one in wanted:
            name = named(place, one)
            if name in seen or not one.numel:
                continue
            seen.add(name)
            users[name] = place.number
            unit = "" if place.block else _unit(one.name, workload.path)
            want = Want(name=name, numel=one.numel, itemsize=DTYPES.get(one.dtype, 4), key=(one.dtype, one.trainable))
            if one.name in tied:
                asking.append(Asking(f"{place.number} ({name})", [want], alone=True))
            else:
                units.setdefault(unit, []).append(want)
        asking += [Asking(f"{place.number} {unit}", wants) for unit, wants in units.items()]
    level = keeping.effective_level
    buckets = plan_units(asking, keeping.group, keeping.bucket_bytes, JOINED[level])
    bucket_of = {slot.name: bucket for bucket in buckets for slot in bucket.slots}
    numbers: dict[int, dict[Bucket, None]] = {}
    outside: dict[Bucket, None] = {}
    blocks = {place.number for place in places if place.block}
    for name, number in users.items():
        numbers.setdefault(number, {})[bucket_of[name]] = None
        if number not in blocks:
            outside[bucket_of[name]] = None
    sharers = Counter(bucket for unit in asking for bucket in {bucket_of[want.name] for want in unit.wants})
    return Held(
        buckets,
        {number: list(found) for number, found in numbers.items()},
        list(outside),
        shared=frozenset(bucket for bucket, number in sharers.items() if number > 1),
        tied=[bucket_of[unit.wants[0].name] for unit in asking if unit.alone],
    )


def lasting(keeping: Keeping, held: Held) -> Lasting:
    """What of these buckets a rank keeps."""
    level = keeping.effective_level
    trained = [bucket for bucket in held.buckets if bucket.trainable]
    away = _away(keeping, held.buckets) if keeping.offloads else frozenset()
    on_host = keeping.offloads and keeping.offload.parameters == "host"
    weights = gradients = optimizer = counters = 0
    for bucket in held.buckets:
        width = DTYPES.get(bucket.dtype, 4)
        if not on_host:
            weights += width * (bucket.shard_numel if level == 3 else bucket.numel)
        if not bucket.trainable:
            continue
        span = bucket.numel if level == 0 else bucket.shard_numel
        whole = not keeping.every_turn or (level == 0 and bucket not in away)
        if bucket in away:
            gradients += keeping.held_of(width) * bucket.numel if not keeping.every_turn else 0
            continue
        gradients += keeping.held_of(width) * (bucket.numel if whole else bucket.shard_numel)
        optimizer += 4 * span * (keeping.moments + (width != 4 or on_host))
        counters += 4 * len(list(bucket.pieces(slice(0, span))))
    if keeping.held is None and any(DTYPES[bucket.dtype] != 4 for bucket in trained):
        counters += 4 * max((b.shard_numel if level else b.numel for b in trained if b not in away), default=0)
    host = host_need(keeping, held.buckets, away) if keeping.offloads else None
    return Lasting(weights, gradients, optimizer, counters, host, away)


def host_need(keeping: Keeping, buckets: Sequence[Bucket], away: frozenset[Bucket], pins: bool = False) -> HostNeed:
    """What a rank takes on its host."""
    offload = keeping.offload
    on_host, delays = offload.parameters == "host", offload.delayed_update > 0

    def widths(bucket: Bucket) -> HostWidths:
        width = DTYPES[bucket.dtype]
        held, wire = keeping.held_of(width), keeping.wire_of(width)
        same = on_host and width == 4 and offload.optimizer == "host" and not delays
        return HostWidths(
            weight=width,
            gradient=held,
            down=wire if keeping.group == 1 and keeping.every_turn else held,
            moments=keeping.moments,
            apart=not same,
        )

    others = [bucket for bucket in buckets if bucket not in away] if on_host else []
    return need(
        [(bucket.shard_numel, widths(bucket)) for bucket in buckets if bucket in away],
        home="disk" if offload.optimizer == "disk" else "host",
        parameters=offload.parameters,
        delayed=delays,
        pins=pins,
        other_weights=sum(bucket.shard_numel * DTYPES.get(bucket.dtype, 4) for bucket in others),
    )


def _away(keeping: Keeping, buckets: Sequence[Bucket]) -> frozenset[Bucket]:
    trained = [bucket for bucket in buckets if bucket.trainable]
    fraction = keeping.offload.fraction
    part = 1.0 if fraction == "auto" else fraction
    return frozenset(trained[at] for at in choose([bucket.shard_numel for bucket in trained], part))


def _unit(name: str, path: str) -> str:
    """The module outside the blocks that owns a parameter, and whose parent holds blocks."""
    first, *others = [one.split(".") for one in path.split(", ")]
    parts = name.split(".")[:-1]
    shared = max(
        (next((at for at, (a, b) in enumerate(zip(parts, one)) if a != b), min(len(parts), len(one))))
        for one in (first, *others)
    )
    return ".".join(parts[: shared + 1])
