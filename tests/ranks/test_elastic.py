"""A rank that dies under torchrun: all start again and go on from the newest whole checkpoint.

Close (1e-5): the losses of every step and those of a run that nobody disturbed. `python -m tests.faults` does more.
"""

from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests import faults
from tests.command import fill, zero3d
from zero3d.comm.attempt import agree_on_attempt
from zero3d.errors import RankFailedError

pytestmark = [pytest.mark.alone, pytest.mark.cli]


def test_a_rank_that_is_killed_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    """What the other rank says is one line: whom it lost."""
    outcome = faults.disturb(fill(tmp_path), "kill", seed=1)
    assert outcome.good, outcome
    assert len(outcome.errors) <= 1, "the survivor's, where torchrun lets it speak"


def test_a_restart_without_resume_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would begin anew, and move the checkpoints aside."""
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    done = zero3d(fill(tmp_path), "train", "tiny.toml", "--set", "parallel.dp=1")
    assert done.returncode == 2 and "restart 1" in done.stderr and "Add --resume" in done.stderr


def test_ranks_that_are_started_again_meet_each_other_and_not_what_earlier_ones_left() -> None:
    """torchrun keeps one store for all attempts: counters and addresses of ranks that were gone were taken for those of
    ranks that were there."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    found: list[set[str]] = []
    for ranks in (3, 3, 2):  # The last time on fewer.
        store.set("hello 1", "of a rank that was ended before anyone answered")
        words = dict.fromkeys(range(ranks), "")

        def meet(rank: int, ranks: int = ranks, words: dict[int, str] = words) -> None:
            words[rank] = agree_on_attempt(store, rank, ranks, timedelta(seconds=20))

        threads = [Thread(target=meet, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append(set(words.values()))
    assert [len(one) for one in found] == [1, 1, 1] and len(set.union(*found)) == 3

    with pytest.raises(RankFailedError, match="ranks 2 did not come"):
        meet_one(store)
        agree_on_attempt(store, 0, 3, timedelta(seconds=2))


def meet_one(store: object) -> Thread:
    """Rank 1 of three; rank 2 never comes."""
    thread = Thread(target=lambda: agree_on_attempt(store, 1, 3, timedelta(seconds=20)), daemon=True)  # type: ignore[arg-type]
    thread.start()
    thread.join(timeout=0.1)
    return thread
