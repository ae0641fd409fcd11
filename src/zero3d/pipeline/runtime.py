"""Runs a rank's actions. The only loop over micro-batches there is."""

from collections.abc import Mapping, Sequence

from zero3d.contracts import Batch, Replica, Stage, Watcher
from zero3d.pipeline.action import Action, Kind, forwards_pile_up
from zero3d.pipeline.uneven import Padding


def run(
    actions: Sequence[Action],
    stages: Mapping[int, Stage],
    replica: Replica,
    micro_batches: Sequence[Batch],
    watcher: Watcher,
) -> None:
    """Each backward, or half of one, is a turn of its stage; ZeRO is told which turns are this rank's first and last of
    the step, and which are padding and count for nothing. Receives of an action are posted before the one before it."""
    if forwards_pile_up(actions):
        replica.rest()
    turns = [number for number, action in enumerate(actions) if action.kind is not Kind.FORWARD]
    for number, action in enumerate(actions):
        for one in actions[number : number + 2]:
            _expect(one, stages[one.stage], micro_batches)
        stage, index = stages[action.stage], action.micro_batch
        if action.kind is Kind.FORWARD:
            with watcher.acting(action):
                stage.forward(index, micro_batches[index])
            continue
        counts = not isinstance(micro_batches[index], Padding)
        turn = replica.turn(action.stage, number == turns[0], number == turns[-1], counts=counts)
        with watcher.acting(action), turn:
            if action.kind is Kind.BACKWARD:
                stage.backward(index)
            elif action.kind is Kind.INPUT:
                stage.input_backward(index)
            else:
                stage.weight_backward(index)


def _expect(action: Action, stage: Stage, micro_batches: Sequence[Batch]) -> None:
    if action.kind is Kind.FORWARD:
        stage.expect(action.micro_batch, micro_batches[action.micro_batch])
    elif action.kind is not Kind.WEIGHT:
        stage.expect_gradients(action.micro_batch)
