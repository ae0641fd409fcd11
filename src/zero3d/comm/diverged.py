"""Ranks whose collective calls of a step all ended, and were not the same ones."""

import torch

from zero3d.comm.apart import compared
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.comm.texts import everyones_text
from zero3d.errors import DivergedError


def diverged(axis: RecordedAxis, device: torch.device, when: str) -> DivergedError:
    """What the ranks did differently since the axis' `start_step`. when: "in step 3". Collective."""
    mine = "\n".join(f"{call.verb.replace('_', '-')} of {call.label}" for call in axis.calls)
    texts = everyones_text(mine, axis.inner, device, "lists of calls")
    if len(set(texts)) == 1:
        return DivergedError(
            f"ranks of another data-parallel group do different things {when}",
            hint="Their own error says what. Nothing has been updated.",
        )
    differs, hint = compared([text.splitlines() for text in texts])
    return DivergedError(f"ranks do different things {when}: {differs}", hint=f"{hint} Nothing has been updated.")
