"""Whether a schedule computes each gradient once and in the order that all layouts share. Pure.

Whether its ranks ever wait for each other in a circle is what `simulate` finds out.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from zero3d.errors import ConfigError
from zero3d.pipeline.action import Action, Kind

Ranks = Sequence[Sequence[Action]]
GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT)
"""What adds a micro-batch to the gradients of weights."""


def check(ranks: Ranks, placement: Sequence[Sequence[int]] | None = None, where: str = "") -> None:
    """Raises `ConfigError` unless

    - each stage is on one rank, the one that `placement` says where it is given;
    - each micro-batch has in each stage one F, and one B or an I and a W, in this order on its rank;
    - each stage adds gradients in the order of micro-batches: the sum's bits are those of every other layout.
    """
    for problem in _problems(ranks, placement):
        raise ConfigError(f"not a legal schedule: {problem}", where=where, hint=RULE)


RULE = (
    "Each micro-batch needs in each stage one F and then one B, or an I and a W, all on the rank that holds the stage, "
    "and a stage's B and W are in the order of micro-batches."
)


def _problems(ranks: Ranks, placement: Sequence[Sequence[int]] | None) -> Iterator[str]:
    holders: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if placement is not None and action.stage not in placement[rank]:
                yield f"{action.full} is on rank {rank}, which does not hold stage {action.stage}"
            if holders.setdefault(action.stage, rank) != rank:
                yield f"{action.full} is on rank {rank}, and rank {holders[action.stage]} holds stage {action.stage}"
    counted = Counter(action for actions in ranks for action in actions)
    for action, count in counted.items():
        if count > 1:
            yield f"{action.full} is there {count} times"
    stages = 1 + max((action.stage for action in counted), default=-1)
    micro_batches = 1 + max((action.micro_batch for action in counted), default=-1)
    if not stages:
        yield "it has no actions"
    for stage in range(stages):
        if stage not in holders:
            yield f"no rank holds stage {stage} of {stages}"
        for index in range(micro_batches):
            yield from _missing(stage, index, counted)
    for actions in ranks:
        yield from _out_of_order(actions)


def _missing(stage: int, index: int, found: Counter[Action]) -> Iterator[str]:
    forward, whole, part, weight = (Action(kind, stage, index) for kind in Kind)
    if forward not in found:
        yield f"{forward.full} is missing"
    if whole in found and (part in found or weight in found):
        yield f"{whole.full} is there, and {(part if part in found else weight).full}, which is a part of it"
    if whole not in found and (part not in found or weight not in found):
        lacking = [one.full for one in (part, weight) if one not in found]
        yield f"{whole.full} is missing" if len(lacking) == 2 else f"{lacking[0]} is missing"


def _out_of_order(actions: Sequence[Action]) -> Iterator[str]:
    done: set[Action] = set()
    latest: dict[int, Action] = {}
    for action in actions:
        if action.kind is not Kind.FORWARD:
            before = Action(
                Kind.INPUT if action.kind is Kind.WEIGHT else Kind.FORWARD, action.stage, action.micro_batch
            )
            if before not in done:
                yield f"{action.full} comes before {before.full}"
        if action.kind in GRADIENTS:
            last = latest.setdefault(action.stage, action)
            if last.micro_batch > action.micro_batch:
                yield f"{last.full} comes before {action.full}: gradients would be added in another order"
            latest[action.stage] = action
        done.add(action)
