"""What people should see of a run while it goes on, in one line. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Notice:
    """kind: "loss-spike", "slow-rank" or "memory"; rank: the one it is about, None: none in particular."""

    step: int
    kind: str
    message: str
    rank: int | None = None
