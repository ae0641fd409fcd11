"""Several engines in one process, and what an engine says of itself."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import tiny
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

SCRIPT = """
import pathlib, sys, torch, zero3d
losses = []
for level in (0, 1, 2, 3, 3):
    torch.manual_seed(0)
    loss = lambda out, batch: (out.square().sum(), 1)
    engine = zero3d.Engine(torch.nn.Linear(4, 4), loss, config={"zero": {"level": level}})
    losses.append(engine.step(torch.ones(2, 4)).loss)
    engine.close()
pathlib.Path(sys.argv[1], f"losses-{engine.rank}").write_text(" ".join(map(repr, losses)))
"""


def test_engines_in_a_row_under_torchrun(tmp_path: Path) -> None:
    """Each opened the process group anew, and ranks met at keys that the group before had left: they hung at random."""
    script = tmp_path / "many.py"
    script.write_text(SCRIPT, encoding="utf-8")
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        str(tmp_path),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [(tmp_path / f"losses-{rank}").read_text().split() for rank in range(2)]
    assert len(losses[0]) == 5 and len({*losses[0], *losses[1]}) == 1


def two_at_once() -> bool:
    """A teacher and a student, in turns."""
    batches = [tiny.part(batch, torch.distributed.get_rank(), 2) for batch in tiny.batches(3, 4)]
    alone = [zero3d.Engine(tiny.tiny(seed), tiny.loss, tiny.adamw, {"zero": {"level": 3}}) for seed in (0, 1)]
    expected = [[engine.step(batch).loss for batch in batches] for engine in alone]
    both = [zero3d.Engine(tiny.tiny(seed), tiny.loss, tiny.adamw, {"zero": {"level": 3}}) for seed in (0, 1)]
    found: list[list[float]] = [[], []]
    for batch in batches:
        for number, engine in enumerate(both):
            found[number].append(engine.step(batch).loss)
    return found == expected


def test_two_engines_at_once() -> None:
    assert run_ranks(2, two_at_once) == [True, True]


def closed() -> str:
    engine = zero3d.Engine(nn.Linear(4, 4), lambda out, batch: (out.sum(), 1))
    engine.step(torch.ones(2, 4))
    engine.close()
    with pytest.raises(zero3d.UsageError) as caught:
        engine.step(torch.ones(2, 4))
    return str(caught.value)


def test_a_closed_engine_says_so() -> None:
    assert "closed" in run_ranks(1, closed)[0]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def normed(level: int) -> tuple[str, Tensor, Tensor]:
    engine = zero3d.Engine(Normed(), lambda out, batch: (out.sum(), 1), config={"zero": {"level": level}})
    for _ in range(2):
        engine.step(torch.randn(3, 4, generator=torch.Generator().manual_seed(engine.rank)))
    return engine.notice, engine.full_state_dict()["norm.running_mean"], engine.model.norm.running_mean  # type: ignore[union-attr,return-value]


def test_batch_normalisation_is_told_and_its_statistics_agree_in_files() -> None:
    for level in (2, 3):
        (notice, saved, mine), (_, also_saved, theirs) = run_ranks(2, normed, level)
        assert "Batch normalisation" in notice
        assert ("No list of repeated blocks" in notice) == (level == 3)
        assert not torch.equal(mine, theirs)
        assert torch.equal(saved, also_saved) and torch.equal(saved, mine)


def unheard(optimizer: Any, **options: Any) -> str:
    with pytest.raises(zero3d.UsageError) as caught:
        zero3d.Engine(nn.Linear(4, 4), lambda out, batch: (out.sum(), 1), optimizer, {"optimizer": options})
    return str(caught.value)


def settings() -> list[str]:
    return [
        unheard(torch.optim.AdamW, lr=0.5),
        unheard(lambda p: torch.optim.SGD(p, lr=0.1), weight_decay=0.1, clip_norm=1.0),
        unheard(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
    ]


def test_settings_that_nobody_hears_are_refused() -> None:
    [(first, second, third)] = run_ranks(1, settings)
    assert "optimizer.lr is set" in first
    assert "optimizer.weight_decay is set" in second
    assert "function of parameters" in third


def sent() -> tuple[int, int]:
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, {"zero": {"level": 2}})
    batch = tiny.part(tiny.batches(1, 4)[0], engine.rank, 2)
    engine.step(batch)
    before = engine.sent_bytes()["dp"][engine.rank]
    engine.full_state_dict()
    engine.evaluate(batch)
    return before, engine.sent_bytes()["dp"][engine.rank]


def test_sent_bytes_are_those_of_steps() -> None:
    for before, after in run_ranks(2, sent):
        assert before == after > 0


def nothing_counted(level: int) -> list[tuple[bool, bool, float]]:
    """All targets masked: on one rank, then on all."""
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, {"zero": {"level": level}})
    found = []
    for masked in ((1,), (0, 1)):
        batch = tiny.part(tiny.batches(1, 4)[0], engine.rank, 2)
        if engine.rank in masked:
            batch["targets"].fill_(-100)
        before = engine.full_state_dict()
        report = engine.step(batch)
        after = engine.full_state_dict()
        moved = any(not torch.equal(value, before[name]) for name, value in after.items())
        found.append((report.skipped, moved, report.loss))
    return found


@pytest.mark.parametrize("level", range(4))
def test_masked_targets(level: int) -> None:
    for (skipped, moved, loss), (all_skipped, all_moved, no_loss) in run_ranks(2, nothing_counted, level):
        assert not skipped and moved and loss > 0
        assert all_skipped and not all_moved and no_loss != no_loss
