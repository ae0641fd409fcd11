"""Zero bubble with one stage a rank (Qi et al. 2023, section 2): the backward is cut in two.

I, gradients of the input, is what the rank before waits for; W, those of weights, can fill any gap. H1 on 3 ranks:

    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

A micro-batch is live until its W. H1 puts W off by `rank` micro-batches, so that every rank has as many live as the
first rank of 1F1B: `ranks`. H2 begins with more forwards and has `2 ranks - 1` live; its ranks then end as far apart as
they began, and are idle between their first action and their last only where an update need not wait for all of them.
"""

from zero3d.pipeline.action import Action, Kind


def zbh1(stages: int, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Rank r holds stage r, begins with `ranks - 1 - r` forwards and puts weight-backwards off by r.

    >>> [str(action) for action in zbh1(2, 2, 3)[1]]
    ['F0', 'I0', 'F1', 'I1', 'W0', 'F2', 'I2', 'W1', 'W2']
    """
    return [_of_rank(rank, ranks - 1 - rank, rank, micro_batches) for rank in range(ranks)]


def zbh2(stages: int, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Rank r holds stage r, begins with `2 (ranks - 1 - r)` forwards and puts weight-backwards off by 2 r."""
    return [_of_rank(rank, 2 * (ranks - 1 - rank), 2 * rank, micro_batches) for rank in range(ranks)]


def _of_rank(stage: int, warm_up: int, put_off: int, micro_batches: int) -> list[Action]:
    actions = [Action(Kind.FORWARD, stage, index) for index in range(min(warm_up, micro_batches))]
    for index in range(micro_batches):
        if index + warm_up < micro_batches:
            actions.append(Action(Kind.FORWARD, stage, index + warm_up))
        actions.append(Action(Kind.INPUT, stage, index))
        if index >= put_off:
            actions.append(Action(Kind.WEIGHT, stage, index - put_off))
    left = range(max(micro_batches - put_off, 0), micro_batches)
    return actions + [Action(Kind.WEIGHT, stage, index) for index in left]
