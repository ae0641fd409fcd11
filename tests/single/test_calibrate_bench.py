"""The stopwatch of `zero3d calibrate` by a clock that moves as the test says."""

from collections.abc import Iterable
from itertools import cycle

import pytest
import torch
from torch import Tensor

from zero3d.calibrate import bench
from zero3d.calibrate.bench import STRETCH, Bench

CALL = STRETCH / 5


class Done:
    def wait(self) -> None:
        pass


class Pair:
    """Two ranks, of which this is one: each has a clock of its own, and in a call the earlier waits for the other."""

    size = 2

    def __init__(self, mine: Iterable[float], other: Iterable[float]) -> None:
        self.mine, self.other = 0.0, 0.0
        self.works = zip(cycle(mine), cycle(other))

    def work(self) -> None:
        mine, other = next(self.works)
        self.mine, self.other = self.mine + mine, self.other + other

    def all_gather(self, out: Tensor, part: Tensor, label: str) -> Done:
        self.mine = self.other = max(self.mine, self.other) + CALL
        out.copy_(part.expand(2))
        return Done()


@pytest.mark.parametrize(
    ("mine", "other", "waits"),
    [
        ((1.0, 1.0), (1.0, 1.0), 0.0),
        ((0.5, 1.5), (1.5, 0.5), 0.5),
        ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 2.0), 0.25),
    ],
)
def test_ranks_wait_for_the_slowest(
    monkeypatch: pytest.MonkeyPatch, mine: tuple[float, ...], other: tuple[float, ...], waits: float
) -> None:
    """Stretches of work, in parts of what one is: of this rank's time for them it waits so much for the other."""
    pair = Pair([part * STRETCH for part in mine], [part * STRETCH for part in other])
    monkeypatch.setattr(bench, "perf_counter", lambda: pair.mine)
    found = Bench(pair, torch.device("cpu"), 0.01).waits(pair.work)  # type: ignore[arg-type]
    assert found == pytest.approx(waits, abs=0.02)


def test_a_rank_alone_waits_for_nobody() -> None:
    alone = Pair([STRETCH], [STRETCH])
    alone.size = 1
    assert Bench(alone, torch.device("cpu"), 0.01).waits(alone.work) == 0.0  # type: ignore[arg-type]
