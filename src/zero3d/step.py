"""THE TRAINING STEP, top to bottom."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero3d.assemble import Parts
from zero3d.contracts import Batch, Watcher
from zero3d.optim.clip import Clip, clip
from zero3d.optim.tally import Part, Totals, agree
from zero3d.pipeline.runtime import run
from zero3d.unwatched import UNWATCHED


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a step did. `updated` is False where numbers were not finite or no target was counted."""

    totals: Totals
    clipping: Clip
    divisor: float
    updated: bool


def train_step(
    parts: Parts, micro_batches: Sequence[Batch], step: int, lr: float, watcher: Watcher = UNWATCHED
) -> Done:
    """Forward and backward of every micro-batch, with their reductions, then one update. Collective.

    `lr` is a factor of the optimizer's own learning rate. Losses and gradients are sums until the very end, when
    they are divided by the number of targets that all ranks together counted.
    """
    _start(parts)
    with parts.randomness.step(step):
        run(parts.actions(len(micro_batches)), parts.stages, parts.replica, micro_batches, watcher)
    parts.pipeline.settle()
    parts.scaler.share(parts.speaks, parts.model_axis, parts.device)
    shards = parts.replica.finish()
    for shared in parts.sums:
        parts.replica.has_changed(shared.add_up())

    totals = _agree(parts)
    divisor = max(totals.count, 1) * parts.scaler.scale
    clipping = clip(totals.squares, divisor, parts.clip_norm)
    updated = totals.finite and totals.same_calls and totals.count > 0
    parts.scaler.update(totals.finite)
    if updated:
        parts.optimizer.leave(totals.unused - parts.shared)
        with watcher.doing("update"):
            parts.replica.publish(parts.optimizer.step(shards, lr, clipping.coefficient / divisor))
    return Done(totals=totals, clipping=clipping, divisor=divisor, updated=updated)


@torch.no_grad()
def evaluate_step(parts: Parts, micro_batches: Sequence[Batch], outputs: list[Any] | None = None) -> Totals:
    """The loss alone, as `train_step` averages it; `outputs` gets those of micro-batches. Collective."""
    _start(parts)
    for number, micro_batch in enumerate(micro_batches):
        for stage in parts.stages.values():
            stage.evaluate(number, micro_batch, outputs)
    parts.pipeline.settle()
    return _agree(parts, trains=False)


def _start(parts: Parts) -> None:
    for axis in parts.axes:
        axis.start_step()
    for stage in parts.stages.values():
        stage.start()


def _agree(parts: Parts, *, trains: bool = True) -> Totals:
    totals = agree(_mine(parts, trains), parts.axis, parts.model_axis, parts.device)
    parts.axis.aside.found = totals.aside
    return totals


def _mine(parts: Parts, trains: bool) -> Part:
    outcomes = [outcome for stage in parts.stages.values() for outcome in stage.outcomes]
    return Part(
        losses=[outcome.loss for outcome in outcomes],
        counts=[outcome.count for outcome in outcomes],
        norms=parts.replica.norms(parts.uncounted) if trains and parts.counts_norms else (),
        arrivals=parts.replica.arrivals() if trains else {},
        digest=parts.axis.digest,
        speaks=parts.speaks,
        aside=parts.axis.aside.mine,
    )
