"""The three queues of offload, and where a step's seconds went.

down     gradients: device -> host, added up there
update   the optimizer, bucket by bucket
up       new weights: host -> device
"""

from dataclasses import dataclass

import torch

from zero3d.comm.streams import Queue
from zero3d.contracts import Watcher


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one step, on this rank. down, update, up: that their queues worked; waited: that the rank stood still for
    them. (What a step's end leaves under way counts for the next one.)"""

    down: float
    update: float
    up: float
    waited: float

    @property
    def hidden(self) -> float:
        """What of the queues' work went on beside the computing, or beside each other."""
        return max(self.down + self.update + self.up - self.waited, 0.0)


class Queues:
    """Three threads, and on a GPU three streams; late: see `Queue`."""

    def __init__(self, device: torch.device, *, late: bool = False) -> None:
        self.down, self.update, self.up = (Queue(name, device, late=late) for name in ("down", "update", "up"))
        self.closed = False

    def watch(self, watcher: Watcher) -> None:
        """From now on it is told of all jobs."""
        for queue in (self.down, self.update, self.up):
            queue.watcher = watcher

    def take_seconds(self) -> Seconds:
        """Since it was asked last."""
        found = [queue.take_seconds() for queue in (self.down, self.update, self.up)]
        down, update, up = (busy for busy, _ in found)
        return Seconds(down=down, update=update, up=up, waited=sum(waited for _, waited in found))

    def close(self) -> None:
        for queue in (self.down, self.update, self.up):
            queue.close()
        self.closed = True
