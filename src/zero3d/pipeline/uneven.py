"""Ranks with different numbers of micro-batches in a step, or none at all.

    rank 0   0  1  2
    rank 1   0  P  P      P: padding

Ranks agree on the largest number before the step. One that has fewer runs more turns on a micro-batch that it has
seen: its collective calls match the others' by construction, and what comes of it, loss, count and gradients, is left
out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero3d.contracts import Axis, Batch
from zero3d.errors import DataError, DivergedError
from zero3d.trees import tensors_in

_ENDED = object()


@dataclass(frozen=True)
class Padding:
    """A micro-batch that is run and counts for nothing."""

    batch: Batch


@dataclass(frozen=True, kw_only=True)
class Mine:
    """What this rank brings to a step: its micro-batches, one that it has seen before (None: none yet), and which
    parameters it is told to train, as a digest."""

    micro_batches: Sequence[Batch]
    seen: Batch
    trained: int = 0


def own(micro_batches: Sequence[Batch]) -> list[Batch]:
    """Those that have samples and are no padding."""
    return [one for one in micro_batches if not isinstance(one, Padding) and _has_samples(one)]


def even_out(mine: Mine, axis: Axis, device: torch.device) -> list[Batch]:
    """My micro-batches, and padding up to the number of the rank that has most; one at least. Collective.

    Raises `DataError` on every rank where padding is needed and some rank has seen no batch yet.
    """
    counted = own(mine.micro_batches)
    # A batch without samples is a stand-in for one that was never seen, where the model takes it.
    spare = next((one for one in (*counted[:1], mine.seen, *mine.micro_batches[:1]) if one is not None), None)
    row = torch.tensor([len(counted), spare is not None, mine.trained], dtype=torch.int64, device=device)
    every = torch.empty(axis.size * row.numel(), dtype=torch.int64, device=device)
    axis.all_gather(every, row, "number of micro-batches").wait()
    rows: list[list[int]] = every.view(axis.size, -1).tolist()
    if len({trained for _, _, trained in rows}) > 1:
        raise DivergedError(
            "ranks differ in which parameters are to be trained (requires_grad)",
            hint="Every rank must freeze and unfreeze the same parameters before the same step.",
        )
    most = max(1, *(number for number, _, _ in rows))
    unready = [rank for rank, (number, has_spare, _) in enumerate(rows) if number < most and not has_spare]
    if unready:
        raise DataError(
            f"rank {', '.join(map(str, unready))} has no batch and has not seen one yet, so it cannot run along",
            hint="A rank may have nothing only after its first batch: give every rank samples in the first step.",
        )
    return [*counted, *[Padding(spare)] * (most - len(counted))]


def together(loader: Iterable[Batch], axis: Axis, device: torch.device) -> Iterator[Batch]:
    """The batches of `loader`, then None until those of all ranks have ended. Each turn is collective."""
    mine = iter(loader)
    while True:
        batch = next(mine, _ENDED)
        going = torch.tensor([int(batch is not _ENDED)], dtype=torch.int64, device=device)
        axis.all_reduce(going, "whether a rank has a batch").wait()
        if not int(going):
            return
        yield None if batch is _ENDED else batch


class Buffers:
    """The model's buffers, such as running statistics, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [(buffer, buffer.clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def put_back(self) -> None:
        """They are again as they were."""
        for buffer, before in self._kept:
            buffer.copy_(before)


def _has_samples(batch: Batch) -> bool:
    return all(len(tensor) > 0 for tensor in tensors_in(batch) if tensor.dim())
