"""1F1B (Narayanan et al. 2021, section 2.2): as soon as it can, a rank does one forward, one backward in turn.

    rank 0   F0 F1 F2             B0--- F3 B1---    B2---    B3---
    rank 1      F0 F1       B0--- F2 B1--- F3 B2---    B3---
    rank 2         F0 B0--- F1 B1--- F2 B2--- F3 B3---

As long as GPipe, but rank r has no more than `ranks - r` micro-batches live.
"""

from zero3d.pipeline.action import Action, Kind


def one_f_one_b(stages: int, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Rank r holds stage r and begins with `ranks - 1 - r` forwards.

    >>> [str(action) for action in one_f_one_b(2, 2, 3)[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    return [_of_rank(rank, min(ranks - 1 - rank, micro_batches), micro_batches) for rank in range(ranks)]


def _of_rank(stage: int, warm_up: int, micro_batches: int) -> list[Action]:
    actions = [Action(Kind.FORWARD, stage, index) for index in range(warm_up)]
    for index in range(micro_batches):
        if index + warm_up < micro_batches:
            actions.append(Action(Kind.FORWARD, stage, index + warm_up))
        actions.append(Action(Kind.BACKWARD, stage, index))
    return actions
