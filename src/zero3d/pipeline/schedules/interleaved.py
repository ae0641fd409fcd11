"""Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): each rank holds v stages, `ranks` apart, so that a
micro-batch goes round v times and what is idle shrinks v-fold.

2 ranks with stages 0, 2 and 1, 3 (written micro-batch.stage):

    rank 0   F0.0 F1.0 F0.2 F1.2 F2.0      B0.2----- F3.0 B1.2----- F2.2 B0.0----- F3.2 ...
    rank 1        F0.1 F1.1 F0.3 B0.3----- F1.3 B1.3----- F2.1 B0.1----- F3.1 B1.1----- ...

Micro-batches go in groups: a rank takes one group through each of its stages before it begins with the next group.
A group has at least as many micro-batches as there are ranks, or the group would come back late and leave gaps.
"""

from collections.abc import Iterator

from zero3d.pipeline.action import Action, Kind


def interleaved(stages: int, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Rank r holds the stages r, r + ranks, r + 2 ranks, ...; any number of micro-batches."""
    return [_of_rank(range(rank, stages, ranks), ranks - 1 - rank, micro_batches, ranks) for rank in range(ranks)]


def _of_rank(mine: range, behind: int, micro_batches: int, ranks: int) -> list[Action]:
    """`behind`: how many ranks come after this one."""
    groups = list(_groups(micro_batches, ranks))
    forwards = [Action(Kind.FORWARD, stage, index) for group in groups for stage in mine for index in group]
    backwards = [Action(Kind.BACKWARD, stage, index) for group in groups for stage in reversed(mine) for index in group]
    # The first micro-batch comes back once its group has been in all my stages but the last and has passed the ranks
    # behind, there and back; one stage a rank needs no more than plain 1F1B begins with.
    passed = 2 * behind if len(mine) > 1 else behind
    warm_up = min(passed + (len(mine) - 1) * len(groups[0]), len(forwards))
    actions, rest = forwards[:warm_up], forwards[warm_up:]
    for forward, backward in zip(rest, backwards):
        actions += [forward, backward]
    return actions + backwards[len(rest) :]


def _groups(micro_batches: int, ranks: int) -> Iterator[range]:
    """As many groups of at least `ranks` as there can be, the larger ones first, and no two far apart in size."""
    number = max(micro_batches // ranks, 1)
    size, larger = divmod(micro_batches, number)
    start = 0
    for group in range(number):
        end = start + size + (group < larger)
        yield range(start, end)
        start = end
