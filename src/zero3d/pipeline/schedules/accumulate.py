"""Gradient accumulation: the pipeline of one stage.

    F0 B0 F1 B1 F2 B2 ...

Each micro-batch is done with before the next begins, so that one micro-batch's activations are live.
"""

from zero3d.pipeline.action import Action, Kind


def accumulate(stages: int, ranks: int, micro_batches: int) -> list[list[Action]]:
    """The schedule of one stage on one rank.

    >>> [str(action) for action in accumulate(1, 1, 2)[0]]
    ['F0', 'B0', 'F1', 'B1']
    """
    if stages != 1 or ranks != 1:
        raise ValueError(f"accumulation has one stage on one rank, not {stages} on {ranks}")
    return [[Action(kind, 0, index) for index in range(micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD)]]
