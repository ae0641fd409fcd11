"""Why the neighbours of a plan, each of which differs from it in one setting, are not in its place. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from zero3d.planner.choice import HOMES, Choice
from zero3d.planner.judge import Aim, Plan, Rejected, gb, impossible, sent, slower
from zero3d.planner.search import STAGES_PER_RANK, judged
from zero3d.planner.sending import Sent
from zero3d.planner.timing import StepTime

CAUSES = {
    "products": "products",
    "attention": "attention",
    "moving": "other operations",
    "tp": "traffic over tp",
    "again": "computing again",
    "gathers": "gathers over dp",
    "reductions": "reductions over dp",
    "idle": "waits for other stages",
    "update": "the update",
    "host": "the host",
}


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """change: such as "micro_batch 4"; found: a plan that is slower, or why it is none; sent: by axis, also of one that
    does not fit"""

    change: str
    found: Plan | Rejected
    reason: str
    sent: Mapping[str, Sent] = field(default_factory=dict)


def neighbours(aim: Aim, best: Plan) -> list[Neighbour]:
    """Of the best plan."""
    found = []
    for change, choice in _changes(aim, best.choice):
        cannot = impossible(aim, choice)
        result = cannot if cannot is not None else judged(aim, choice)
        sends = sent(aim, choice) if cannot is None else {}
        found.append(Neighbour(change=change, found=result, reason=_reason(result, best), sent=sends))
    return found


def improved(aim: Aim, best: Plan, rounds: int = 4) -> tuple[Plan, list[Neighbour]]:
    """The best plan, or a neighbour that is faster, and so on; and the neighbours of that."""
    for _ in range(rounds):
        around = neighbours(aim, best)
        plans = [one.found for one in around if isinstance(one.found, Plan)]
        faster = min(plans, key=lambda plan: plan.time.seconds, default=best)
        if faster.time.seconds >= best.time.seconds:
            break
        best = faster
    return best, around


def _reason(result: Plan | Rejected, best: Plan) -> str:
    if isinstance(result, Rejected):
        return f"{result.why}: {result.reason}"
    times = result.time.seconds / best.time.seconds
    if times <= 1:
        mine, its = gb(result.footprint.total), gb(best.footprint.total)
        return f"as fast, with {mine} against {its}" if mine != its else "as fast, in as much memory"
    causes = {name: getattr(result.time, name) - getattr(best.time, name) for name in CAUSES}
    worst = max(causes, key=lambda name: causes[name])
    now, before = (_milliseconds(one.time, worst) for one in (result, best))
    return f"{slower(times)}: {CAUSES[worst]} {now} against {before}"


def _milliseconds(time: StepTime, name: str) -> str:
    value: float = getattr(time, name)
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _changes(aim: Aim, best: Choice) -> Iterator[tuple[str, Choice]]:
    for axis in ("tp", "pp"):
        for size in (2 * getattr(best, axis), getattr(best, axis) // 2):
            other = best.pp if axis == "tp" else best.tp
            if size and aim.devices % (size * other) == 0:
                yield f"{axis} {size}", _resized(aim, best, axis, size)
    if best.pp > 1:
        for schedule, stages in [("1f1b", 1), ("zbh1", 1), *(("interleaved", one) for one in STAGES_PER_RANK)]:
            if (schedule, stages) != (best.schedule, best.stages_per_rank):
                name = schedule if stages == 1 else f"{schedule}, {stages} stages a rank"
                yield f"schedule {name}", best.changed(schedule=schedule, stages_per_rank=stages)
    for level in range(4) if best.dp > 1 else ():
        if level != best.level and (level == 3 or best.offload != "parameters") and (level or best.offload == "none"):
            keep = best.keep_gathered and level == 3
            reduce = "step" if level == 0 else best.reduce
            yield f"level {level}", best.changed(level=level, keep_gathered=keep, reduce=reduce)
    if best.level:
        reduce = "step" if best.reduce == "micro-batch" else "micro-batch"
        yield f"reduce {reduce}", best.changed(reduce=reduce)
    if best.level == 3:
        keep = not best.keep_gathered
        yield f"keep_gathered {'step' if keep else 'no'}", best.changed(keep_gathered=keep)
    if best.tp > 1:
        whole = not best.sequence_parallel
        yield f"sequence_parallel {'yes' if whole else 'no'}", best.changed(sequence_parallel=whole)
    for size in (2 * best.micro_batch, best.micro_batch // 2):
        if size:
            yield f"micro_batch {size}", best.changed(micro_batch=size)
    if aim.blocks:
        mode = "none" if best.recompute == "block" else "block"
        yield f"recompute {mode}", best.changed(recompute=mode)
    for offload in HOMES:
        if offload != best.offload:
            level = 3 if offload == "parameters" else max(best.level, 1) if offload == "optimizer" else best.level
            if level == best.level:
                yield f"offload {offload}", best.changed(offload=offload)


def _resized(aim: Aim, best: Choice, axis: str, size: int) -> Choice:
    sizes = {"tp": best.tp, "pp": best.pp, axis: size}
    dp = aim.devices // (sizes["tp"] * sizes["pp"])
    samples = max(aim.global_batch // dp, 1)
    changed = best.changed(**sizes, dp=dp, samples=samples, micro_batch=min(best.micro_batch, samples))
    if sizes["tp"] == 1 or best.tp == 1:
        changed = changed.changed(sequence_parallel=sizes["tp"] > 1)
    if sizes["pp"] == 1 or best.pp == 1:
        changed = changed.changed(schedule="1f1b", stages_per_rank=1)
    if dp == 1 and best.offload == "none":
        changed = changed.changed(level=0, reduce="step", keep_gathered=False)
    return changed
