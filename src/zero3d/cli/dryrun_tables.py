"""A rehearsal for people: what each rank holds at its peak, what made it, and what it sends."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zero3d.cli.plain_table import PlainTable
from zero3d.cli.style import count, size
from zero3d.cli.tables import axes_text
from zero3d.config import Config
from zero3d.dryrun.ledger import KINDS
from zero3d.dryrun.rehearsal import RankRehearsal, Rehearsal

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_MODULES = 8
ABREAST = 4
"""Ranks in one table."""
NUMBER = re.compile(r"^(.*\.)?(\d+)$")


def parts(found: Rehearsal, config: Config) -> "Iterator[RenderableType]":
    """Tables and sentences, in their order."""
    ranks = f"{found.world:,} rank{'s' * (found.world > 1)}"
    yield f"Peak of a step on {ranks}: {axes_text(config)}, ZeRO level {config.zero.level}"
    for start in range(0, len(found.ranks), ABREAST):
        yield held(found.ranks[start : start + ABREAST])
    yield from (traffic(found),) if any(rank.traffic for rank in found.ranks) else ()
    largest = max(found.ranks, key=lambda rank: rank.peak.total)
    yield modules(largest)
    yield from sentences(found)


def held(ranks: Sequence[RankRehearsal]) -> PlainTable:
    """A column for each of these ranks."""
    shown = PlainTable("", [""], [f"rank {rank.rank:,}" for rank in ranks], drop=[])
    rows: list[tuple[str, Callable[[RankRehearsal], str]]] = [
        ("stages", lambda rank: ", ".join(map(str, rank.stages))),
        ("parameters", lambda rank: count(rank.parameters)),
        *((kind, lambda rank, kind=kind: size(rank.peak.by_kind[kind])) for kind in KINDS),
    ]
    for name, cell in rows:
        shown.add_row(name, *map(cell, ranks))
    shown.add_row("peak", *(size(rank.peak.total) for rank in ranks), style="bold")
    shown.add_row("at", *(rank.peak.action for rank in ranks))
    for place, of in (("on the host", "host"), ("on disk", "disk")):
        bytes_of = [rank.host_bytes if of == "host" else rank.lasting.get(of, 0) for rank in ranks]
        if any(bytes_of):
            shown.add_row(place, *map(size, bytes_of))
    shown.add_row("FLOPs", *(count(rank.flops) for rank in ranks))
    return shown


def traffic(found: Rehearsal) -> PlainTable:
    """One line for each rank and axis."""
    shown = PlainTable("Sent in a step", ["rank", "axis"], ["bytes"], ["calls"], drop=["calls"])
    for rank in found.ranks:
        for axis, one in rank.traffic.items():
            calls = ", ".join(f"{number:,} {verb.replace('_', '-')}" for verb, number in one.calls.items())
            shown.add_row(f"{rank.rank:,}", axis, size(one.sent), calls)
    return shown


def modules(rank: RankRehearsal) -> PlainTable:
    """What made the activations that are there at the peak; blocks that follow each other and are alike as one."""
    shown = PlainTable(f"Made at the peak of rank {rank.rank:,}", ["module"], ["bytes", "each"], drop=["each"])
    found = together(rank.peak.modules)
    for name, number, nbytes in found[:MOST_MODULES]:
        shown.add_row(name, size(number * nbytes), size(nbytes) if number > 1 else "")
    rest = sum(number * nbytes for _, number, nbytes in found[MOST_MODULES:])
    if rest:
        shown.add_row(f"{len(found) - MOST_MODULES} others", size(rest), "")
    return shown


def together(of: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """(name, how many, bytes of each), largest sum first.

    >>> together({"blocks.0": 5, "blocks.1": 5, "head": 7})
    [('blocks.0 to blocks.1', 2, 5), ('head', 1, 7)]
    """
    runs: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for name, nbytes in of.items():
        match = NUMBER.match(name)
        key = ((match[1] or "") if match else name, nbytes)
        runs.setdefault(key, []).append((int(match[2]) if match else 0, name))
    found = []
    for (_, nbytes), names in runs.items():
        first, last = min(names)[1], max(names)[1]
        found.append((first if first == last else f"{first} to {last}", len(names), nbytes))
    return sorted(found, key=lambda one: -one[1] * one[2])


def sentences(found: Rehearsal) -> list[str]:
    told = []
    if found.timeline:
        told.append(f"By FLOPs alone a step takes {found.bubble:.0%} longer than what the busiest stage computes.")
    if found.rehearsed < found.micro_batches:
        told.append(
            f"{found.rehearsed} of {found.micro_batches} micro-batches were rehearsed: with more of them no rank holds "
            "more, and each sends and computes the same."
        )
    told.append(f"Rehearsed in {found.seconds:.0f} s on tensors without data; what an allocator adds comes on top.")
    return [*dict.fromkeys(rank.notice for rank in found.ranks if rank.notice), *told]
