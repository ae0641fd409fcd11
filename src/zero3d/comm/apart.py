"""The words for ranks that do different things. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a rank waits. what: "all-gather of weights of blocks.1"; step: from 1, 0 outside of steps; call:
    the user's, "engine.step"; lines: of the user's code, outermost first."""

    rank: int
    what: str
    step: int = 0
    call: str = ""
    lines: Sequence[str] = field(default=())


def told(standings: Sequence[Standing]) -> tuple[str, str]:
    """(message, hint) for ranks that wait for each other."""
    steps, calls = {one.step for one in standings}, {one.call for one in standings}
    by_place: dict[str, list[int]] = {}
    for one in sorted(standings, key=lambda one: one.rank):
        place = f"the {one.what}"
        if len(calls) > 1 and one.call:
            place += f" ({one.call})"
        if len(steps) > 1:
            place += f" in step {one.step}" if one.step else ""
        by_place.setdefault(place, []).append(one.rank)
    groups = [
        f"{_ranks(ranks)}{_waits(ranks, not index)} for {place}"
        for index, (place, ranks) in enumerate(by_place.items())
    ]
    step = next(iter(steps))
    when = f" in step {step}" if len(steps) == 1 and step else ""
    message = f"ranks do different things{when}: {', '.join(groups)}"
    known = sorted(call for call in calls if call)
    if len(known) > 1:
        advice = f"{' and '.join(known)} are collective: every rank must make the same calls, in the same order."
    else:
        advice = same_blocks(one.what for one in standings)
    stacks = [f"rank {one.rank} was at {' > '.join(one.lines)}" for one in standings if one.lines]
    return message, "\n".join([advice, *stacks])


def compared(calls: Sequence[Sequence[str]]) -> tuple[str, str]:
    """(what differs, hint) of the calls ("all-gather of weights of blocks.1") that each rank made, in their order."""
    first = Counter(calls[0])
    other = next((rank for rank, made in enumerate(calls) if Counter(made) != first), 0)
    pair = (0, other)
    extra = [_more(calls[mine], Counter(calls[theirs])) for mine, theirs in (pair, pair[::-1])]
    parts = [
        f"rank {rank} made the {what}" if what else f"rank {rank} made none that the other did not"
        for rank, what in zip(pair, extra)
    ]
    return ", ".join(parts), same_blocks(what for what in extra if what)


def same_blocks(whats: Iterable[str]) -> str:
    """What to do where ranks gather the weights of different blocks."""
    found = (re.fullmatch(r"all-gather of weights of (.+?)(/\d+)?", what) for what in whats)
    names = sorted({match[1] for match in found if match and match[1] != "(root)"})
    if not names:
        return "Every rank must make the same calls, and run the same modules, in the same order."
    patterns = ", ".join(f'"{name}.*"' for name in names)
    return (
        "At ZeRO level 3 every rank must run the same blocks in the same order. Where ranks may leave blocks out, set "
        f"zero.keep_gathered = [{patterns}]."
    )


def _more(mine: Sequence[str], theirs: Mapping[str, int]) -> str:
    """The first call of mine that they made fewer times."""
    count: Counter[str] = Counter()
    for call in mine:
        count[call] += 1
        if count[call] > theirs.get(call, 0):
            return call
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _waits(ranks: Sequence[int], first: bool) -> str:
    """The verb is said once."""
    return "" if not first else " wait" if len(ranks) > 1 else " waits"
