"""What ranks tell each other in words and numbers."""

from collections.abc import Mapping

import torch

from zero3d.contracts import Axis


def everyones_text(mine: str, axis: Axis, device: torch.device, label: str) -> list[str]:
    """The texts of all ranks of `axis`, by index, each of its own length. label: what they say. Collective."""
    data = torch.tensor(list(mine.encode()), dtype=torch.uint8)
    length = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    lengths = torch.empty(axis.size, dtype=torch.int64, device=device)
    axis.all_gather(lengths, length, f"lengths of {label}").wait()
    longest = max(int(lengths.max()), 1)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    every = torch.empty(axis.size * longest, dtype=torch.uint8, device=device)
    axis.all_gather(every, padded.to(device), label).wait()
    rows = every.view(axis.size, longest).cpu()
    return [bytes(row[:numel].tolist()).decode() for row, numel in zip(rows, lengths.tolist())]


def everyones_numbers(mine: Mapping[str, int], axis: Axis, device: torch.device, label: str) -> dict[str, list[int]]:
    """Of each name the numbers of all ranks of `axis`, by index. All have the same names, in the same order.
    Collective."""
    numbers = torch.zeros(axis.size, len(mine), dtype=torch.int64, device=device)
    numbers[axis.index] = torch.tensor(list(mine.values()), device=device)
    axis.all_reduce(numbers.view(-1), label).wait()
    return dict(zip(mine, numbers.t().tolist()))
