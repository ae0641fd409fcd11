"""One entry of a schedule. Pure.

Written `F0 F1 B0 ...` (kind, micro-batch) where each rank holds one stage, else `F0.2` (kind, micro-batch, stage).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

_TEXT = re.compile(r"([FBIW])(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)


class Kind(Enum):
    """A schedule has for each stage and micro-batch one F, and either one B or an I and later a W."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the stage's input and of its weights."""
    INPUT = "I"
    """The part of the backward that the stage before waits for."""
    WEIGHT = "W"
    """The rest: gradients of weights, which nobody waits for until the end of the step."""


@dataclass(frozen=True)
class Action:
    """Compute `kind` of micro-batch `micro_batch` in stage `stage`; printed as F0, B0, F1, ..."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}"

    @property
    def full(self) -> str:
        """With its stage: F0.2 is the forward of micro-batch 0 in stage 2."""
        return f"{self}.{self.stage}"


def taken_before(actions: Sequence[Action], stage: int) -> dict[int, list[int]]:
    """Micro-batch of each forward of a stage -> those whose gradients the stage has taken since the forward before it,
    in the order of its rank's `actions`."""
    found: dict[int, list[int]] = {}
    taken: list[int] = []
    for action in actions:
        if action.stage == stage and action.kind is Kind.FORWARD:
            found[action.micro_batch], taken = taken, []
        elif action.stage == stage and action.kind is not Kind.WEIGHT:
            taken.append(action.micro_batch)
    return found


def forwards_pile_up(actions: Sequence[Action]) -> bool:
    """Whether several forwards come before all else: gradients are not there when most is kept for backwards."""
    forwards = [number for number, action in enumerate(actions) if action.kind is Kind.FORWARD]
    return len(forwards) > 1 and forwards[-1] == len(forwards) - 1


def whole_backwards(actions: Sequence[Action]) -> list[Action]:
    """The same with one B for an I of the first stage that its W follows at once: no stage waits for what the I gives,
    and nothing is gained by keeping what the W needs.

    >>> [str(one) for one in whole_backwards([Action(Kind.INPUT, 0, 1), Action(Kind.WEIGHT, 0, 1)])]
    ['B1']
    """
    found: list[Action] = []
    for action in actions:
        if action.kind is Kind.WEIGHT and not action.stage and found and found[-1] == replace(action, kind=Kind.INPUT):
            found[-1] = replace(action, kind=Kind.BACKWARD)
        else:
            found.append(action)
    return found


def written(ranks: Iterable[Iterable[Action]]) -> list[list[str]]:
    """Each rank's actions as text; with stages where some rank holds several.

    >>> written([[Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 1, 0)]])
    [['F0.0', 'F0.1']]
    """
    ranks = [list(actions) for actions in ranks]
    several = any(len({action.stage for action in actions}) > 1 for actions in ranks)
    return [[action.full if several else str(action) for action in actions] for actions in ranks]


def read(text: str) -> tuple[Kind, int, int | None] | None:
    """Kind, micro-batch and stage (None where it names none) of what `written` writes; None for other text.

    >>> read("F0.2")
    (<Kind.FORWARD: 'F'>, 0, 2)
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    return Kind(match[1]), int(match[2]), None if match[3] is None else int(match[3])
