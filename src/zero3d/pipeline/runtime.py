"""Runs a rank's actions. The only loop over micro-batches there is."""

from collections import Counter
from collections.abc import Mapping, Sequence

from zero3d.contracts import Batch, Replica, Stage
from zero3d.pipeline.action import Action, Kind
from zero3d.pipeline.uneven import Padding


def run(
    actions: Sequence[Action], stages: Mapping[int, Stage], replica: Replica, micro_batches: Sequence[Batch]
) -> None:
    """Each backward is a turn of its stage; ZeRO is told which turns are the step's first and last, and which are
    padding and count for nothing."""
    turns = Counter(action.stage for action in actions if action.kind is Kind.BACKWARD)
    done: Counter[int] = Counter()
    for action in actions:
        stage, index = stages[action.stage], action.micro_batch
        if action.kind is Kind.FORWARD:
            stage.forward(index, micro_batches[index])
            continue
        done[action.stage] += 1
        first, last = done[action.stage] == 1, done[action.stage] == turns[action.stage]
        with replica.turn(action.stage, first, last, counts=not isinstance(micro_batches[index], Padding)):
            stage.backward(index, None)
