"""Pieces of tensors on their way from the ranks that hold them to rank 0, which puts them together."""

import json
from collections.abc import Iterator

import torch
from torch import Tensor

from zero3d.checkpoint.hub import Weight
from zero3d.checkpoint.rebuild import put
from zero3d.checkpoint.slices import Part, Span, cut, whole
from zero3d.checkpoint.state import Held, Holdings
from zero3d.checkpoint.together import Together
from zero3d.contracts import Axis

PORTION = 1 << 22
"""Bytes that are sent at a time."""


class Pieces:
    """Who sends what of which weight: of what several ranks hold alike the first one. Making it is collective."""

    def __init__(self, holdings: Holdings, axis: Axis, device: torch.device, together: Together) -> None:
        self._axis = axis
        self._device = device
        self._mine: dict[str, list[Held]] = {}
        for held in (*holdings.weights(), *holdings.buffers()):
            if held.counts and held.alike.index == 0 and held.span.numel:
                self._mine.setdefault(held.name, []).append(held)
        told = {name: [_told(held) for held in of] for name, of in self._mine.items()}
        self._of_rank = [json.loads(text) for text in together.to_first(json.dumps(told), "lists of pieces")]

    def gather(self, weight: Weight) -> Tensor | None:
        """The whole tensor, flat, on rank 0's CPU; None elsewhere. Collective. An error of this rank's own is raised
        once all has been sent and received."""
        if self._axis.index == 0:
            return self._collect(weight)
        self._send(weight)
        return None

    def _send(self, weight: Weight) -> None:
        failed: Exception | None = None
        for held in self._mine.get(weight.name, ()):
            for at, numel in _portions(held.span.numel, weight):
                try:
                    values = self._values(held, weight, at, numel)
                except Exception as error:  # Rank 0 waits for it.
                    failed, values = error, torch.zeros(numel, dtype=weight.dtype, device=self._device)
                self._axis.send(values.view(torch.uint8), 0, weight.name).wait()
        if failed is not None:
            raise failed

    def _collect(self, weight: Weight) -> Tensor:
        failed: Exception | None = None
        out, landing = torch.empty(0), torch.empty(PORTION, dtype=torch.uint8, device=self._device)
        try:
            out = torch.empty(weight.numel, dtype=weight.dtype)
        except Exception as error:
            failed = error
        for rank, of in enumerate(self._of_rank):
            for number, (dim, ranges, padding, begin, total) in enumerate(of.get(weight.name, ())):
                part = _part(weight, dim, ranges, padding)
                for at, numel in _portions(total, weight):
                    if rank:
                        came = landing[: numel * weight.dtype.itemsize]
                        self._axis.recv(came, rank, weight.name).wait()
                    try:
                        mine = None if rank else self._mine[weight.name][number]
                        values = self._values(mine, weight, at, numel) if mine else came.view(weight.dtype)
                        if failed is None:
                            put(values, Span(part, begin + at, numel), weight.shape, out)
                    except Exception as error:
                        failed = error
        if failed is not None:
            raise failed
        return out

    def _values(self, held: Held, weight: Weight, at: int, numel: int) -> Tensor:
        return held.tensor[at : at + numel].detach().to(self._device, weight.dtype)


def _portions(total: int, weight: Weight) -> Iterator[tuple[int, int]]:
    """(first element, number) of what is sent at a time."""
    step = PORTION // weight.dtype.itemsize
    for at in range(0, total, step):
        yield at, min(step, total - at)


def _told(held: Held) -> list[object]:
    part = held.span.part
    return [held.dim, list(part.ranges), part.padding, held.span.begin, held.span.numel]


def _part(weight: Weight, dim: int | None, ranges: list[list[int]], padding: int) -> Part:
    if dim is None:
        return whole(weight.shape)
    return cut(weight.shape, dim, [(start, stop) for start, stop in ranges], padding)
