"""Zero bubble in the shape of a V (Qi et al. 2023, section 6): rank r holds stages r and 2 ranks - 1 - r.

A micro-batch goes down the ranks and comes back up, so that the first rank also computes the loss and the last
turns round without sending. 2 ranks (written micro-batch.stage):

    rank 0   F0.0 F1.0 F2.0 F0.3 I0.3 W0.3 F1.3 I1.3 W1.3 I0.0 F3.0 W0.0 F2.3 I2.3 W2.3 ...
    rank 1        F0.1 F0.2 F1.1 F1.2 I0.2 W0.2 I0.1 F2.1 W0.1 F2.2 I1.2 W1.2 I1.1 F3.1 ...

Found by playing the step turn by turn, each action one turn long. A rank prefers what comes back to it (the later
stage's forward, the earlier stage's input part) to what comes for the first time, and leaves weights for turns with
nothing else. It holds at most `2 ranks` activations of its half-sized stages, no more than the first rank of 1F1B
does, and while a forward is to come and there is no room it does weights first. With `2 ranks` micro-batches or more,
and all actions of the same length, no rank is idle between its first action and its last.
"""

from collections import deque
from collections.abc import Iterator

from zero3d.pipeline.action import Action, Kind


def zbv(stages: int, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Rank r holds the stages r and 2 ranks - 1 - r."""
    players = [_Player(rank, ranks, micro_batches) for rank in range(ranks)]
    done: set[Action] = set()
    while not all(player.has_ended for player in players):
        # All choose by what was done before this turn.
        turn = [chosen for player in players if (chosen := player.choose(done)) is not None]
        assert turn, "every rank waits"
        done.update(turn)
    return [player.actions for player in players]


class _Player:
    """One rank as it plays: what it has done and what it could do next."""

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self.actions: list[Action] = []
        self._early, self._late = rank, 2 * ranks - 1 - rank
        self._last = 2 * ranks - 1
        self._micro_batches = micro_batches
        self._room = 2 * ranks
        self._next = {(kind, stage): 0 for kind in (Kind.FORWARD, Kind.INPUT) for stage in (self._early, self._late)}
        self._weights: deque[Action] = deque()

    @property
    def has_ended(self) -> bool:
        return len(self.actions) == 6 * self._micro_batches

    def choose(self, done: set[Action]) -> Action | None:
        """The next action, None where all wait for others."""
        chosen = next((one for one in self._by_urgency() if self._is_ready(one, done)), None)
        if chosen is None:
            return None
        self.actions.append(chosen)
        if chosen.kind is Kind.WEIGHT:
            self._weights.popleft()
            self._room += 1
            return chosen
        self._next[chosen.kind, chosen.stage] += 1
        if chosen.kind is Kind.FORWARD:
            self._room -= 1
        else:
            self._weights.append(Action(Kind.WEIGHT, chosen.stage, chosen.micro_batch))
        return chosen

    def _by_urgency(self) -> Iterator[Action]:
        forwards = [action for stage in (self._early, self._late) for action in self._upcoming(Kind.FORWARD, stage)]
        weight = list(self._weights)[:1]
        if forwards and not self._room:
            yield from weight
        yield from self._upcoming(Kind.INPUT, self._early)
        if self._room:
            yield from reversed(forwards)
        yield from self._upcoming(Kind.INPUT, self._late)
        yield from weight

    def _upcoming(self, kind: Kind, stage: int) -> Iterator[Action]:
        if self._next[kind, stage] < self._micro_batches:
            yield Action(kind, stage, self._next[kind, stage])

    def _is_ready(self, action: Action, done: set[Action]) -> bool:
        kind, stage, index = action.kind, action.stage, action.micro_batch
        if kind is Kind.FORWARD:
            return stage == 0 or Action(kind, stage - 1, index) in done
        if kind is Kind.INPUT:
            after = Action(Kind.FORWARD, stage, index) if stage == self._last else Action(kind, stage + 1, index)
            return after in done
        return True
