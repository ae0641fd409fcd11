"""What each choice of `zero.reduce` costs: a small table of `zero3d show layout`, and the same for programs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zero3d.cli.plain_table import PlainTable
from zero3d.cli.style import size
from zero3d.config import Config
from zero3d.planner.bubble import actions
from zero3d.planner.reduction import Part, StepBytes, step_bytes

if TYPE_CHECKING:
    from zero3d.outline import Outline

CHOICES = ("step", "micro-batch")
WEIGHTS = {0: "weights sent", 1: "weights published", 2: "weights published", 3: "weights gathered"}
"""What is sent of weights, by level."""


def choices(given: Config, ranks: int) -> dict[str, Config]:
    """The configuration as it would be resolved with each of them."""
    tree = given.model_dump()
    return {
        choice: Config.load(tree, [f"zero.reduce={choice}"]).resolved(ranks, native_bf16=False) for choice in CHOICES
    }


def by_pp(config: Config, found: "Outline") -> list[StepBytes]:
    """Of a rank of each index on pp, in a step of the resolved `config`."""
    parts = []
    for pp in range(config.parallel.pp):
        trained, frozen = (
            sum(info.numel for info in found.held(pp) if info.trainable is kind) for kind in (True, False)
        )
        parts.append(Part(trained=trained, frozen=frozen, outside=found.num_outside(pp)))
    return [step_bytes(config, part, mine) for part, mine in zip(parts, actions(config), strict=True)]


def as_event(choices: Mapping[str, Config], found: "Outline") -> dict[str, list[dict[str, int]]]:
    """choice -> by index on pp bytes of gradients that a rank holds, and that it sends over dp in a step."""
    return {
        choice: [
            {"held_bytes": one.held, "reduced_bytes": one.reduced, "weights_bytes": one.weights}
            for one in by_pp(config, found)
        ]
        for choice, config in choices.items()
    }


def table(config: Config, choices: Mapping[str, Config], found: "Outline") -> PlainTable:
    """One row for each choice, of the rank that holds most; the one of `config` is marked."""
    level, count = config.zero.level, config.micro_batches
    who = ", of the rank that has most" if config.parallel.pp > 1 else ""
    times = f"{count} micro-batch{'es' * (count > 1)}"
    title = f"zero.reduce at level {level}, {times}: bytes held, and sent over dp a step{who}"
    sent = ["gradients reduced", WEIGHTS[level]]
    shown = PlainTable(title, ["zero.reduce"], ["gradients held", *sent], drop=[])
    for choice, one in choices.items():
        most = _most(by_pp(one, found))
        chosen = choice == config.zero.reduce
        cells = [size(number) for number in (most.held, most.reduced, most.weights)]
        shown.add_row(f"{'▸' if chosen else ' '} {choice}", *cells, style="bold green" if chosen else None)
    return shown


def _most(found: Sequence[StepBytes]) -> StepBytes:
    return max(found, key=lambda one: (one.held, one.reduced))
