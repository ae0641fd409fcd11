"""What `zero.reduce` costs a rank: the gradients that it holds, and what it sends over dp in a step. Pure.

A rank's part of the model has Psi trained parameters and Phi frozen ones, over N ranks of dp; w, g and t are the bytes
of a weight, a held gradient and one that travels. A step has T turns, each a backward of a stage and micro-batch, or
a half of one where the schedule splits it.

                        "step"               "micro-batch"
    held                g Psi                g Psi / N, at level 0 g Psi
    reduced             t Psi (N-1)/N        T t Psi (N-1)/N
      at level 0        + g Psi (N-1)/N      + g Psi (N-1)/N          the sums are gathered

    weights, level 0    0
             1 and 2    w Psi (N-1)/N                                 published once
             3          2 M w (Psi + Phi) (N-1)/N                     gathered for each of M forwards and backwards

Each of several stages of a rank gathers its own blocks, but all modules outside them. With R groups (`zero.replicas`)
N is dp/R, and each reduction sends 2 x 4 Psi/N (R-1)/R bytes across the groups too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zero3d.config import Config
from zero3d.pipeline.action import Action, Kind, whole_backwards
from zero3d.planner.memory import BYTES, states, widths_of

PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)
"""What needs weights. (Gradients of weights are made of what the other half of a backward has kept.)"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements of a rank's part of the model, before ZeRO shards it. outside: of both, those outside all blocks."""

    trained: int
    frozen: int
    outside: int


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """held: of gradients on a rank; reduced, weights: bytes that it sends over dp in a step, as an ideal ring does."""

    held: int
    reduced: int
    weights: int


def step_bytes(config: Config, part: Part, actions: Sequence[Action]) -> StepBytes:
    """Of a rank that does `actions` in a step of the resolved `config`."""
    actions = whole_backwards(actions)
    zero, dp = config.zero, config.parallel.dp
    assert dp != "auto" and zero.reduce != "auto", "resolved"
    group = dp // zero.replicas
    widths = widths_of(config)
    held = states(part.trained, zero.level, dp=dp, replicas=zero.replicas, widths=widths, reduce=zero.reduce)
    others = (group - 1) / group
    turns = sum(action.kind is not Kind.FORWARD for action in actions)
    one = _travelling(config) * part.trained * others
    one += 2 * 4 * part.trained / group * (zero.replicas - 1) / zero.replicas
    spread = widths.gradients * part.trained * others if zero.level == 0 else 0
    if zero.level == 3:
        elements = _gathered(part, actions)
    else:
        elements = part.trained if zero.level else 0
    return StepBytes(
        held=held.gradients,
        reduced=round(one * (1 if zero.reduce == "step" else turns) + spread),
        weights=round(widths.weights * elements * others),
    )


def _gathered(part: Part, actions: Sequence[Action]) -> float:
    """Elements of all gathers of level 3: of the blocks in each pass of their stage, of others in all passes. Stages
    of one rank are taken to have as many blocks."""
    passes = sum(action.kind in PASSES for action in actions)
    stages = len({action.stage for action in actions})
    return passes * (part.outside + (part.trained + part.frozen - part.outside) / stages)


def _travelling(config: Config) -> int:
    """Bytes of a gradient that travels."""
    widths = widths_of(config)
    own = widths.gradients if config.zero.reduce == "step" else widths.weights
    return BYTES.get(config.precision.reduce, own)
