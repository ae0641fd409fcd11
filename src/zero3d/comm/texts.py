"""What ranks tell each other in words."""

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
