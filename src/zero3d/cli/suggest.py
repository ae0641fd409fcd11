"""Commands to go on with after a run: the user's own with one thing changed, each into a folder of its own.

A command is only suggested when its configuration passes the checks that it would meet.
"""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zero3d.cli import machine
from zero3d.cli.options import Options
from zero3d.config import Config
from zero3d.errors import Zero3dError

if TYPE_CHECKING:
    from zero3d.train import Plan

LONGER = 4
MOST = 3
CROWD = 4
"""This many ranks are bearable on a CPU, however few cores it has."""


class Suggestion(NamedTuple):
    """What it shows, and the words of the command."""

    why: str
    command: str


def suggestions(options: Options, plan: "Plan") -> list[Suggestion]:
    """Three at most, the most telling first."""
    try:
        config = Config.load(options.config, options.settings)
    except Zero3dError:  # the file has changed since
        return []
    # In a new folder there is nothing to go on with.
    options = replace(options, more=tuple(one for one in options.more if one not in ("--resume", "--allow-missing")))
    found: list[Suggestion] = []
    for one in _ideas(options, config, plan):
        if one is not None:
            found.append(one)
    return found[:MOST]


def _ideas(options: Options, config: Config, plan: "Plan") -> Iterator[Suggestion | None]:
    run, world = config.run, plan.world
    if config.num_steps < run.steps:
        yield _all_steps(options, config, world, run.steps, f"all {run.steps:,} steps", "all")
    other = 3 if config.zero.level != 3 else 1
    sharded = "parameters sharded too" if other == 3 else "the optimizer state alone sharded"
    yield _checked(options, config, world, f"the same losses, {sharded}", {"zero.level": f"{other}"}, f"level{other}")
    yield _twice(options, config, world) or _recompute(options, config, world)
    if config.num_steps == run.steps:
        steps = run.steps * LONGER
        yield _all_steps(options, config, world, steps, f"{LONGER} times the training", "long")


def _all_steps(options: Options, config: Config, world: int, steps: int, why: str, suffix: str) -> Suggestion | None:
    changes = {"run.steps": f"{steps}"} if steps != config.run.steps else {}
    # A stop that the command line sets is left out; one in the file can only be moved.
    for stop in ("", f"{steps}"):
        told = _checked(options, config, world, why, {**changes, "run.stop_after": stop}, suffix, steps)
        if told is not None:
            return told
    return None


def _twice(options: Options, config: Config, world: int) -> Suggestion | None:
    twice = world * 2
    if twice > (machine.gpus() or max(machine.cpu_cores(), CROWD)):
        return None
    dp = config.parallel.dp
    changes = {"parallel.dp": f"{dp * 2}"} if dp != "auto" else {}
    asked = replace(options, ranks=twice) if options.ranks is not None or not changes else options
    return _checked(asked, config, twice, "the same global batch on twice the ranks", changes, f"{twice}ranks")


def _recompute(options: Options, config: Config, world: int) -> Suggestion | None:
    if config.recompute.mode == "block":
        return None
    why = "the same losses, fewer activations held"
    return _checked(options, config, world, why, {"recompute.mode": "block"}, "recompute")


def _checked(
    options: Options,
    config: Config,
    ranks: int,
    why: str,
    changes: dict[str, str],
    suffix: str,
    steps: int | None = None,
) -> Suggestion | None:
    """None where that configuration would be refused, or would not take `steps` steps."""
    changes = {**changes, "run.out": free_folder(f"{config.run.out}-{suffix}")}
    try:
        changed = Config.load(options.config, options.changed(changes))
        changed.resolved(ranks, native_bf16=False)
    except Zero3dError:
        return None
    if steps is not None and changed.num_steps != steps:
        return None
    return Suggestion(why, shlex.join(["zero3d", *options.repeated(changes, options.ranks)]))


def free_folder(wanted: str) -> str:
    """`wanted`, or with the first number behind it that is not there yet."""
    name, number = wanted, 2
    while Path(name).exists():
        name, number = f"{wanted}-{number}", number + 1
    return name
