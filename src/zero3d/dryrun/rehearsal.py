"""What a rehearsal finds out. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero3d.dryrun.ledger import Peak


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one rank in one step, over one axis. sent: bytes, as an ideal ring sends; calls: by verb."""

    sent: int
    calls: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RankRehearsal:
    """What one rank does and holds in a step.

    stages: that it has; lasting: kind -> bytes that it holds between steps, those elsewhere than on its device
    ("host", "disk", "staging") too; flops: of all actions
    """

    rank: int
    stages: Sequence[int]
    parameters: int
    peak: Peak
    lasting: Mapping[str, int]
    traffic: Mapping[str, Traffic]
    flops: int
    notice: str = ""

    @property
    def host_bytes(self) -> int:
        return self.lasting.get("host", 0) + self.lasting.get("staging", 0)

    def as_event(self) -> dict[str, Any]:
        """What programs read: design's keys first, then more."""
        return {
            "rank": self.rank,
            "stage": self.stages[0] if self.stages else 0,
            "stages": list(self.stages),
            "parameters": self.parameters,
            "peak_bytes": self.peak.total,
            "peak_by_kind": dict(self.peak.by_kind),
            "host_bytes": self.host_bytes,
            "disk_bytes": self.lasting.get("disk", 0),
            "sent_bytes": {axis: one.sent for axis, one in self.traffic.items()},
            "calls": {axis: dict(one.calls) for axis, one in self.traffic.items()},
            "flops": self.flops,
            "peak_action": self.peak.action,
            "peak_by_module": dict(self.peak.modules),
            "peak_by_action": [list(one) for one in self.peak.actions],
        }


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Of several ranks of a world. micro_batches: of a step; rehearsed: how many of them were, from which what all of
    them would send and compute follows (the peak is that of all). bubble: by the FLOPs of each action."""

    world: int
    ranks: Sequence[RankRehearsal]
    micro_batches: int
    rehearsed: int
    bubble: float
    seconds: float
    timeline: Sequence[Sequence[tuple[str, float, float]]] = field(default=())
    """By index on pp: (action, start, end), in units of a step's time."""

    def as_event(self) -> dict[str, Any]:
        return {
            "world": self.world,
            "micro_batches": self.micro_batches,
            "rehearsed_micro_batches": self.rehearsed,
            "ranks": [rank.as_event() for rank in self.ranks],
            "bubble": self.bubble,
            "timeline": [[list(run) for run in runs] for runs in self.timeline],
            "seconds": self.seconds,
        }
