"""What was in memory at every moment of a step: births and deaths of storages, added up. Pure.

What lives over steps counts by its kind for all of the step, as it does in every step but the first. All else is made
in the step: `activations` is what forward and backward make, `buffers` what is made between them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")
OUTSIDE = "(outside of modules)"


@dataclass(slots=True)
class Life:
    """A storage of `nbytes`. Moments count births and deaths; `death` None: it lives on. where: path of the module that
    made it, in its forward or backward; action: of the schedule, such as "F0"; "" outside of actions."""

    nbytes: int
    birth: int
    where: str
    action: str
    death: int | None = None
    kind: str = ""
    """Of what lives over steps."""
    passes_as: str = ""
    """The kind of what comes and goes, though it may be there between steps."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that is held at one moment of a step, in bytes. action: when; modules: what of the activations each
    module made, largest first; actions: the peak within each, in their order."""

    total: int
    by_kind: Mapping[str, int]
    action: str
    modules: Mapping[str, int]
    actions: Sequence[tuple[str, int]] = field(default=())


def peak(lives: Iterable[Life], lasting: Mapping[str, int], depth: int = 3) -> Peak:
    """lives: of a step; lasting: kind -> bytes of what lives over steps, by the same kinds and others.

    depth: parts of a path by which modules are told apart, so that blocks are and their parts are not.
    """
    passing = [life for life in lives if not life.kind and life.nbytes]
    changes: list[tuple[int, int, Life]] = [(life.birth, life.nbytes, life) for life in passing]
    changes += [(life.death, -life.nbytes, life) for life in passing if life.death is not None]
    changes.sort(key=lambda change: change[0])
    held = most = 0
    moment, when = 0, ""
    actions: dict[str, int] = {}
    for at, nbytes, life in changes:
        held += nbytes
        if nbytes > 0:
            actions[life.action] = max(actions.get(life.action, 0), held)
        if held > most:
            most, moment, when = held, at, life.action
    there = [life for life in passing if life.birth <= moment and (life.death is None or life.death > moment)]
    always = {kind: lasting.get(kind, 0) for kind in KINDS}
    for life in passing:
        if life.passes_as:
            always[life.passes_as] -= life.nbytes
    by_kind = dict(always)
    modules: Counter[str] = Counter()
    for life in there:
        by_kind[life.passes_as or ("activations" if life.action else "buffers")] += life.nbytes
        modules[_cut(life.where, depth)] += 0 if life.passes_as else life.nbytes
    base = sum(always.values())
    return Peak(
        total=base + most,
        by_kind=by_kind,
        action=when or "the update",
        modules=dict(modules.most_common()),
        actions=[(action or "the update", base + most) for action, most in actions.items()],
    )


OF_MICRO_BATCH = re.compile(r"[FBIW](\d+)(\.| of stage )")


def micro_batch_of(action: str) -> int:
    """1 of "F1.0", and of "F1 of stage 0", as messages between stages are called; -1 of anything else."""
    found = OF_MICRO_BATCH.match(action)
    return int(found[1]) if found else -1


def _cut(path: str, depth: int) -> str:
    """`model.layers.3.mlp.up` -> `model.layers.3`: up to the first number, or to `depth` parts."""
    parts = path.split(".") if path else []
    number = next((at for at, part in enumerate(parts) if part.isdigit()), depth - 1)
    return ".".join(parts[: number + 1]) or OUTSIDE
