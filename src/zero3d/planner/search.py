"""The fastest of the choices that fit. Pure.

    layouts   dp x tp x pp = devices; with schedule, micro-batch and recomputing each makes a group, whose time without
              any traffic over dp bounds that of all its members
    groups    in the order of their bounds, until the bound of the next is past the last plan that is kept
    members   level, when it reduces and gathers, offload: timed by formulas, then looked at for memory, then simulated

What is left out says why, with a number. So do the neighbours of the best plan, which differ from it in one setting.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from zero3d.planner.choice import Choice, divisors, ways_to_keep
from zero3d.planner.judge import Aim, Plan, Rejected, at_least, bound, fits, gb, impossible, refusal, slower, timed

Progress = Callable[[str], None]
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
STAGES_PER_RANK = (2, 4, 8)
NEAR = 1.02
"""A formula's time may be off by so much from the simulated one."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """plans: best first; looked_at: how many choices there were"""

    plans: Sequence[Plan]
    rejected: Sequence[Rejected]
    looked_at: int
    counts: Counter[str] = field(default_factory=Counter)


def search(aim: Aim, *, top: int = 10, progress: Progress = lambda text: None) -> Found:
    """The `top` fastest plans. progress: is told what goes on."""
    rejected: list[Rejected] = []
    groups: list[tuple[float, Choice]] = []
    for layout in layouts(aim, rejected, progress):
        for choice in group_of(aim, layout):
            cannot = impossible(aim, choice)
            if cannot is not None:
                rejected.append(cannot)
            else:
                groups.append((bound(aim, choice), choice))
    groups.sort(key=lambda one: one[0])
    progress(f"{len(groups)} groups of choices")
    kept: list[Plan] = []
    looked_at = 0
    for number, (seconds, group) in enumerate(groups):
        limit = kept[top - 1].time.seconds if len(kept) >= top else inf
        if seconds > limit:
            rejected += [_bounded(aim, one, after) for after, one in groups[number:]]
            break
        for way in ways_to_keep(group.dp):
            looked_at += 1
            found = judged(aim, group.changed(**way), limit)
            if isinstance(found, Rejected):
                rejected.append(found)
            else:
                kept.append(found)
                kept.sort(key=lambda plan: plan.time.seconds)
                limit = kept[top - 1].time.seconds if len(kept) >= top else inf
    rejected += [_slower(plan, kept[0]) for plan in kept[top:]]
    return Found(plans=kept[:top], rejected=rejected, looked_at=looked_at, counts=Counter(one.why for one in rejected))


def layouts(aim: Aim, rejected: list[Rejected], progress: Progress) -> Iterator[Choice]:
    """dp x tp x pp. tp within a machine; over several where nothing else is there."""
    tps = [tp for tp in divisors(aim.devices) if tp <= aim.cluster.per_node]
    for tp in divisors(aim.devices):
        if tp not in tps:
            reason = f"tp {tp} goes over {-(-tp // aim.cluster.per_node)} machines at each product"
            rejected.append(refusal(_layout(aim, tp, 1), "cannot be", reason, tp, "ranks of tp"))
            continue
        progress(f"counting what one of tp {tp} computes and holds")
        cannot = impossible(aim, _layout(aim, tp, aim.devices // tp).changed(dp=1, pp=1, samples=aim.global_batch))
        if cannot is not None:
            rejected.append(cannot)
            continue
        for pp in divisors(aim.devices // tp):
            layout = _layout(aim, tp, pp)
            cannot = impossible(aim, layout)
            if cannot is not None:
                rejected.append(cannot)
            else:
                yield layout


def group_of(aim: Aim, layout: Choice) -> Iterator[Choice]:
    """Schedules, micro-batches, recomputing."""
    schedules = [("1f1b", 1)]
    if layout.pp > 1:
        schedules += [("zbh1", 1)]
        schedules += [("interleaved", one) for one in STAGES_PER_RANK if one * layout.pp <= aim.blocks]
    for schedule, stages in schedules:
        for micro_batch in MICRO_BATCHES:
            if micro_batch > layout.samples:
                break
            for recompute in ("none", "block") if aim.blocks else ("none",):
                yield layout.changed(
                    schedule=schedule, stages_per_rank=stages, micro_batch=micro_batch, recompute=recompute
                )


def judged(aim: Aim, choice: Choice, limit: float = inf) -> Plan | Rejected:
    """A choice that can be; `limit`: seconds from which on nothing more is asked."""
    too_large = _surely_too_large(aim, choice)
    if too_large is not None:
        return too_large
    rough = timed(aim, choice, simulated=False)
    if rough.seconds > limit * NEAR:
        return refusal(choice, "slower", "by formulas", rough.tokens_per_second, "tokens/s")
    too_large = _surely_too_large(aim, choice, courses=True)
    if too_large is not None:
        return too_large
    footprint, too_large = fits(aim, choice)
    if too_large is not None:
        return too_large
    return Plan(choice=choice, time=timed(aim, choice) if choice.pp > 1 else rough, footprint=footprint)


def _surely_too_large(aim: Aim, choice: Choice, *, courses: bool = False) -> Rejected | None:
    lowest = at_least(aim, choice, courses=courses)
    if lowest <= aim.memory:
        return None
    reason = f"{gb(lowest)} or more of {gb(aim.memory)} that a device has for it"
    return refusal(choice, "does not fit", reason, lowest, "bytes")


def _layout(aim: Aim, tp: int, pp: int) -> Choice:
    dp = aim.devices // (tp * pp)
    samples = max(aim.global_batch // dp, 1)
    return Choice(dp=dp, tp=tp, pp=pp, samples=samples, micro_batch=1, sequence_parallel=tp > 1)


def _bounded(aim: Aim, choice: Choice, seconds: float) -> Rejected:
    tokens = aim.global_batch * aim.workload(choice.tp, choice.sequence_parallel).tokens
    return refusal(choice, "slower", "without any traffic over dp", tokens / seconds, "tokens/s")


def _slower(plan: Plan, best: Plan) -> Rejected:
    reason = f"{slower(plan.time.seconds / best.time.seconds)} than the best"
    return refusal(plan.choice, "slower", reason, plan.time.tokens_per_second, "tokens/s")
