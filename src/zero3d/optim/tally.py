"""What the ranks agree on once a step, in one small all-reduce of integers over dp, and one over each replica's ranks.

| squares | counted targets | non-finite groups | loss | digest of calls | its square | arrivals           | aside |
  24           1                  1              24            1                1         one each trainable
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor

from zero3d.computed import is_fake
from zero3d.contracts import Axis
from zero3d.exact import LARGEST, LIMBS, exact_sum, sum_of_squares, value_of

DIGESTS = 1 << 24
"""The squares of digests below this, added over thousands of ranks, fit an int64."""
TOGETHER = 1 << 21
"""Norms that are added up at a time: with offload those of the host would else take a part of the device's memory."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over ranks and micro-batches.

    loss: sum of losses; squares: sum of squared gradient elements, as held; count: counted targets;
    finite: loss and gradients have neither infinities nor NaN; unused: trainable parameters that no rank's
    backward reached; same_calls: all ranks made the same collective calls; aside: what else they had to tell.
    """

    loss: float
    squares: float
    count: int
    finite: bool
    unused: frozenset[str]
    same_calls: bool
    aside: Sequence[int] = ()

    @property
    def mean_loss(self) -> float:
        """Over the counted targets; NaN where there are none."""
        return self.loss / self.count if self.count else nan


@dataclass(frozen=True, kw_only=True)
class Part:
    """This rank's part: 0-dim losses and counts of its micro-batches, norms of groups of gradient elements
    (fp64), and what it did. `speaks`: losses and counts are told here, for all ranks that share a replica. `aside`:
    other whole numbers, as many on each rank."""

    losses: Sequence[Tensor]
    counts: Sequence[Tensor]
    norms: Sequence[Tensor]
    arrivals: Mapping[str, int]
    digest: int
    speaks: bool = True
    aside: Sequence[int] = ()


def agree(part: Part, axis: Axis, model: Axis, device: torch.device) -> Totals:
    """Adds the parts of all ranks of `axis`, dp, then of those that share a replica of the `model`, the first of which
    speaks for the losses; exact, so that neither order nor sharding shows."""
    none = torch.zeros((), dtype=torch.int64, device=device)
    losses: list[float] = torch.stack([loss.double() for loss in (*part.losses, none)]).tolist()
    good = [loss for loss in losses if abs(loss) < LARGEST]
    squares = torch.zeros(LIMBS, dtype=torch.int64, device=device)
    bad = torch.full((), len(losses) - len(good), dtype=torch.int64, device=device)
    for run in _runs(part.norms):
        norms = run.to(device)
        found = sum_of_squares(norms), norms.numel() - torch.isfinite(norms).sum()
        if not is_fake(norms):  # In a rehearsal they were made for the memory that they take.
            squares += found[0]
            bad += found[1]
    numbers = torch.stack([torch.stack([*part.counts, none]).sum(), bad])
    digest = part.digest % DIGESTS
    known = torch.tensor(
        [*exact_sum(good), digest, digest * digest, *part.arrivals.values(), *part.aside], device=device
    )
    vector = torch.cat([squares, numbers, known])
    axis.all_reduce(vector, "tally of the step").wait()
    sums: list[int] = vector.tolist()
    total, squared, *rest = sums[2 * LIMBS + 2 :]
    arrivals, aside = rest[: len(part.arrivals)], rest[len(part.arrivals) :]
    differs = int(squared * axis.size != total * total)
    summed = _over_model([*sums[: 2 * LIMBS + 2], differs, *aside], part.speaks, model, device)
    count, not_finite = summed[LIMBS : LIMBS + 2]
    loss, differ = summed[LIMBS + 2 : 2 * LIMBS + 2], summed[2 * LIMBS + 2]
    return Totals(
        loss=value_of(loss) if not not_finite else nan,
        squares=value_of(summed[:LIMBS]) if not not_finite else inf,
        count=count,
        finite=not not_finite,
        unused=frozenset(name for name, total in zip(part.arrivals, arrivals) if not total),
        same_calls=not differ,
        aside=summed[2 * LIMBS + 3 :],
    )


def _runs(norms: Sequence[Tensor]) -> Iterator[Tensor]:
    """Neighbours on one device as one, none of them empty."""
    run: list[Tensor] = []
    room = TOGETHER
    for one in norms:
        room -= one.numel()
        if run and (one.device != run[0].device or room < 0):
            yield torch.cat(run)
            run, room = [], TOGETHER - one.numel()
        if one.numel():
            run.append(one)
    if run:
        yield torch.cat(run)


def _over_model(sums: list[int], speaks: bool, model: Axis, device: torch.device) -> list[int]:
    """What the ranks of a replica have in sum; count and loss are those of the one that speaks."""
    if model.size == 1:
        return sums
    if not speaks:
        sums = [*sums[:LIMBS], 0, sums[LIMBS + 1], *[0] * LIMBS, *sums[2 * LIMBS + 2 :]]
    vector = torch.tensor(sums, dtype=torch.int64, device=device)
    model.all_reduce(vector, "tally of a replica").wait()
    found: list[int] = vector.tolist()
    return found
