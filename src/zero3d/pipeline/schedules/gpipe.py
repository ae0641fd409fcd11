"""GPipe (Huang et al. 2019): all forwards, then all backwards.

    rank 0   F0 F1 F2                   B0--- B1--- B2---
    rank 1      F0 F1 F2          B0--- B1--- B2---
    rank 2         F0 F1 F2 B0--- B1--- B2---

A backward is drawn twice as long as a forward. Every micro-batch is live at the turn.
"""

from zero3d.pipeline.action import Action, Kind


def gpipe(stages: int, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Rank r holds stage r. Backwards keep the order of the forwards: that is how gradients are added everywhere.

    >>> [str(action) for action in gpipe(2, 2, 2)[1]]
    ['F0', 'F1', 'B0', 'B1']
    """
    return [
        [Action(kind, rank, index) for kind in (Kind.FORWARD, Kind.BACKWARD) for index in range(micro_batches)]
        for rank in range(ranks)
    ]
