"""Ranks whose collective calls of a step all ended, and were not the same ones."""

import torch
from torch import Tensor

from zero3d.comm.apart import compared
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.contracts import Axis
from zero3d.errors import DivergedError


def diverged(axis: RecordedAxis, device: torch.device, when: str) -> DivergedError:
    """What the ranks did differently since the axis' `start_step`. when: "in step 3". Collective."""
    mine = "\n".join(f"{call.verb.replace('_', '-')} of {call.label}" for call in axis.calls)
    differs, hint = compared([text.splitlines() for text in _everyones(mine, axis.inner, device)])
    return DivergedError(f"ranks do different things {when}: {differs}", hint=f"{hint} Nothing has been updated.")


def _everyones(text: str, axis: Axis, device: torch.device) -> list[str]:
    data = torch.frombuffer(bytearray(text.encode() or b"\n"), dtype=torch.uint8)
    lengths = torch.zeros(axis.size, dtype=torch.int64, device=device)
    lengths[axis.index] = data.numel()
    axis.all_reduce(lengths, "lengths of lists of calls").wait()
    longest = int(lengths.max())
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: data.numel()] = data
    every = torch.zeros(axis.size * longest, dtype=torch.uint8, device=device)
    axis.all_gather(every, mine.to(device), "lists of calls").wait()
    rows: list[Tensor] = list(every.view(axis.size, -1).cpu())
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist())]
