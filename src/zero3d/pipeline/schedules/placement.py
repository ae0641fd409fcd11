"""Which stages each rank holds."""

from collections.abc import Callable

Placement = Callable[[int, int], list[list[int]]]
"""(stages, ranks) -> the stages of each rank, in the order of the model."""


def in_turn(stages: int, ranks: int) -> list[list[int]]:
    """Stages are dealt out to the ranks in turn.

    >>> in_turn(4, 2)
    [[0, 2], [1, 3]]
    """
    return [list(range(rank, stages, ranks)) for rank in range(ranks)]


def in_a_v(stages: int, ranks: int) -> list[list[int]]:
    """Down the ranks and back up: the first rank holds the first stage and the last.

    >>> in_a_v(4, 2)
    [[0, 3], [1, 2]]
    """
    return [[rank, stages - 1 - rank] for rank in range(ranks)]
