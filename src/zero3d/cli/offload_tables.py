"""What is shown of offload: host memory before a run, and what a step's seconds went into."""

from collections.abc import Mapping, Sequence

from zero3d.cli.plain_table import PlainTable
from zero3d.cli.style import size
from zero3d.config import Config
from zero3d.offload.budget import HostNeed, MachineNeed
from zero3d.planner.memory import ModelStates

KINDS = ("master", "moments", "gradients", "weights", "staging")
"""Of host memory, as `HostNeed` has them."""
MOST_MACHINES = 8
"""In the table; the others are alike."""
MOST_SORTS = 4
"""Of ranks of a machine that need different amounts."""


def offloads(config: Config) -> bool:
    return config.offload.optimizer != "device"


def what_is_offloaded(config: Config) -> str:
    """Such as `optimizer, master weights and gradients on the host, weights on the device`; empty without offload."""
    offload = config.offload
    if not offloads(config):
        return ""
    part = ""
    if offload.fraction == "auto":
        part = f"what makes the rest fit into {offload.device_mb:g} MB: "
    elif offload.fraction < 1:
        part = f"{offload.fraction:.0%} of the elements: "
    parts = ["optimizer, master weights and gradients on the host"]
    if offload.optimizer == "disk":
        parts = ["optimizer and master weights on disk", "gradients on the host"]
    parts.append("weights on the host too" if offload.parameters == "host" else "weights on the device")
    if offload.delayed_update:
        first = f" {offload.delayed_update}" if offload.delayed_update > 1 else ""
        parts.append(f"updates a step late after the first{first}")
    return part + ", ".join(parts)


def home_of(config: Config, kind: str) -> str:
    """The word for where a kind of model state lives of which nothing is on the device."""
    return "disk" if kind == "optimizer" and config.offload.optimizer == "disk" else "host"


def places(config: Config) -> list[str]:
    """Where model states are, as columns of a table; "model states" where there is one place alone."""
    if not offloads(config):
        return ["model states"]
    return ["device", "host", *(["disk"] if config.offload.optimizer == "disk" else [])]


def by_place(config: Config, states: ModelStates) -> list[str]:
    """The bytes of each of the `places`."""
    if not offloads(config):
        return [size(states.total)]
    return [size(getattr(states, place)) for place in places(config)]


def host_memory(machines: Sequence[MachineNeed]) -> PlainTable:
    """What each rank takes of its machine's memory, and all ranks of a machine together."""
    needs = [need for machine in machines for need in machine.needs.values()]
    kinds = [kind for kind in KINDS if any(getattr(need, kind) for need in needs)]
    more = ["on disk"] if any(need.disk for need in needs) else []
    limits = ", ".join(sorted({machine.limit_name for machine in machines if machine.limit_name}))
    columns = ["machine"] if len(machines) > 1 else []
    table = PlainTable(
        "Host memory that offload takes" + (f", of what is free ({limits})" if limits else ""),
        [*columns, "ranks"],
        [*kinds, "in all", "pinned", *more, "free"],
        drop=[*(kind for kind in KINDS if kind in kinds), *more],
    )
    for number, machine in enumerate(machines[:MOST_MACHINES]):
        name = [str(number)] if columns else []
        free = "" if machine.available is None else size(machine.available)
        alike: dict[HostNeed, list[int]] = {}
        for rank, need in machine.needs.items():
            alike.setdefault(need, []).append(rank)
        for need, ranks in list(alike.items())[:MOST_SORTS]:
            who = f"{ranks[0]}" if len(ranks) == 1 else f"each of {_ranks(ranks)}"
            table.add_row(*name, who, *_cells([need], kinds, more), free if len(machine.needs) == 1 else "")
        if len(alike) > MOST_SORTS:
            table.add_row(*name, "..", *[""] * (len(kinds) + 2 + len(more)), "")
        if len(machine.needs) > 1:
            together = _cells(list(machine.needs.values()), kinds, more)
            table.add_row(*name, f"all {len(machine.needs)}", *together, free, style="bold")
    if len(machines) > MOST_MACHINES:
        table.add_row(f".. {len(machines) - 1}", "", *[""] * (len(kinds) + 3 + len(more)))
    return table


def _cells(needs: Sequence[HostNeed], kinds: Sequence[str], more: Sequence[str]) -> list[str]:
    names = [*kinds, "total", "pinned", *(["disk"] if more else [])]
    return [size(sum(getattr(need, name) for need in needs)) for name in names]


def _ranks(ranks: Sequence[int]) -> str:
    """Such as `0-3`, or `0, 2, ..` where they do not follow each other."""
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks[:2])) + (", .." if len(ranks) > 2 else "")


def split_text(split: Mapping[str, float]) -> str:
    """Such as `compute 0.62 s, down 0.05 s, update 0.21 s, up 0.03 s, 0.25 s of it hidden`."""
    queues = ", ".join(f"{name} {_seconds(split[name])}" for name in ("compute", "down", "update", "up"))
    return f"{queues}, {_seconds(split['hidden'])} of it hidden"


def _seconds(duration: float) -> str:
    return f"{duration:.2f} s" if duration >= 0.095 else f"{duration * 1e3:.1f} ms"
