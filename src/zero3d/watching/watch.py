"""Looks at each step of a run: what to notice, and how the ranks compare.

Each rank tells in the exchange that a step ends with what it was asked, how long the step before kept it busy, and how
much memory it has: a list with a place for every rank, of which it fills its own, so that sums are lists. Nothing else
is exchanged. Rank 0 looks.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero3d.comm.aside import Aside
from zero3d.contracts import Watcher
from zero3d.layout import Layout
from zero3d.reports import StepReport
from zero3d.stopping import SIGNALS, Asked, agreed
from zero3d.unwatched import UNWATCHED
from zero3d.watching.growth import Growth
from zero3d.watching.loss_spike import LossSpike
from zero3d.watching.memory_now import memory_now
from zero3d.watching.notice import Notice
from zero3d.watching.slow_rank import SlowRank
from zero3d.watching.waits import Waits

EVERY = 10
"""Steps between two reports of ranks."""
MICRO = 1e6


@dataclass(frozen=True, kw_only=True)
class RanksReport:
    """How ranks did in the steps since the last report, the mean a step. By rank: busy: seconds without waits for
    others (empty where a GPU does the work, as nobody waits on the host then); memory: bytes now, of the process, or of
    its GPU. By axis, of rank 0: waited: seconds; sent: bytes."""

    step: int
    busy: Sequence[float]
    memory: Sequence[int]
    waited: dict[str, float]
    sent: dict[str, int]


class Watch:
    """Of one rank of a run; what is to be told of it rank 0 finds."""

    def __init__(self, aside: Aside, layout: Layout, rank: int, device: torch.device, asked: Asked) -> None:
        self._aside, self._asked = aside, asked
        self._world, self._rank, self._device = layout.world, rank, device
        self._hears = device.type == "cpu"
        self._waits = Waits()
        self._busy = 0.0
        self._ended: float | None = None
        stages = [[one for one in range(layout.world) if layout.place(one).pp == pp] for pp in range(layout.pp)]
        self._slow = [SlowRank(peers) for peers in stages]
        self._spike = LossSpike()
        self._growth = [Growth(rank) for rank in range(layout.world)]
        self._since: list[Sequence[float]] = []
        self._waited: defaultdict[str, float] = defaultdict(float)
        self._sent: Counter[str] = Counter()
        self._steps = 0

    def beside(self, watcher: Watcher) -> Watcher:
        """Who is to watch the next step: `watcher`, or where that is nobody, how long the rank waits."""
        return self._waits if watcher is UNWATCHED else watcher

    def tell(self) -> None:
        """Before a step, or a batch of an evaluation: what this rank says in it."""
        busy, memory = [0] * self._world, [0] * self._world
        busy[self._rank] = round(self._busy * MICRO)
        memory[self._rank] = memory_now(self._device)
        self._aside.mine = [*map(int, self._asked.by()), *busy, *memory]
        self._waits.seconds.clear()
        if self._ended is None:
            self._ended = time.perf_counter()

    @property
    def stop(self) -> str | None:
        """The signal by which all ranks are to end now; the same on all of them."""
        return agreed(self._aside.found[: len(SIGNALS)])

    def stepped(self, report: StepReport) -> tuple[list[Notice], RanksReport | None]:
        """After a step: what to tell of it, on the rank that tells."""
        now = time.perf_counter()
        # What a rank does between steps, such as reading data, makes others wait just as well.
        self._busy = max(now - (self._ended or now) - sum(self._waits.seconds.values()), 0.0)
        self._ended = now
        for axis, seconds in self._waits.seconds.items():
            self._waited[axis] += seconds
        self._sent.update({name: sent for name, sent in report.sent.items() if sent})
        self._steps += 1
        if self._rank != 0:
            return [], None
        told = self._aside.found[len(SIGNALS) :]
        busy = [one / MICRO for one in told[: self._world]]
        memory = told[self._world :]
        spike = self._spike.look(report.loss) if not report.skipped else ""
        found = [Notice(step=report.step, kind="loss-spike", message=spike)] if spike else []
        for rank, growth in enumerate(self._growth):
            if grown := growth.look(memory[rank]):
                found.append(Notice(step=report.step, kind="memory", message=grown, rank=rank))
        if self._hears and self._steps > 2:  # The first step, told of in the second, fills caches.
            self._since.append(busy)
            for stage in self._slow:
                for rank, slow in stage.look(busy):
                    found.append(Notice(step=report.step, kind="slow-rank", message=slow, rank=rank))
        return found, self._ranks(report.step, memory) if self._steps % EVERY == 0 else None

    def _ranks(self, step: int, memory: Sequence[int]) -> RanksReport:
        steps = min(self._steps, EVERY)
        report = RanksReport(
            step=step,
            busy=[sum(by_rank) / len(self._since) for by_rank in zip(*self._since)],
            memory=list(memory),
            waited={axis: seconds / steps for axis, seconds in self._waited.items()} if self._hears else {},
            sent={axis: sent // steps for axis, sent in self._sent.items()},
        )
        self._since.clear()
        self._waited.clear()
        self._sent.clear()
        return report
