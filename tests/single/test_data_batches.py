"""Batches: the same global batch for every dp size, every window once an epoch, resume at any step."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero3d.data.batches import IGNORED, Batches, check_dp, heldout_batches, num_windows
from zero3d.errors import ConfigError, DataError

DIVISORS = [1, 2, 3, 4, 6, 12]


def counting(n: int) -> npt.NDArray[np.uint32]:
    """Tokens that say where they are."""
    return np.arange(n, dtype=np.uint32)


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(6, 400),
    length=st.integers(1, 5),
    step=st.integers(0, 10**6),
    seed=st.integers(0, 2**32),
    dp=st.sampled_from(DIVISORS),
)
def test_the_global_batch_is_the_same_for_every_dp_size(n: int, length: int, step: int, seed: int, dp: int) -> None:
    batches = Batches(counting(n), length, 12, seed)
    whole = batches.batch(step)
    parts = [batches.batch(step, index, dp) for index in range(dp)]
    for key in ("tokens", "targets"):
        assert torch.equal(torch.cat([part[key] for part in parts]), whole[key])
        assert whole[key].dtype == torch.int64 and whole[key].is_contiguous()
        assert all(part[key].shape == (12 // dp, length) for part in parts)


@settings(deadline=None, max_examples=25)
@given(n=st.integers(6, 300), length=st.integers(1, 5), size=st.integers(1, 40), seed=st.integers(0, 99))
def test_every_epoch_visits_every_window_once(n: int, length: int, size: int, seed: int) -> None:
    batches = Batches(counting(n), length, size, seed)
    epochs = 3
    num_steps = -(-epochs * batches.num_windows // size)
    samples = torch.cat([batches.batch(step)["tokens"][:, 0] for step in range(num_steps)])
    starts = list(range(0, batches.num_windows * length, length))
    for epoch in range(epochs):
        first = epoch * batches.num_windows
        assert sorted(samples[first : first + batches.num_windows].tolist()) == starts


@given(n=st.integers(2, 500), length=st.integers(1, 50))
def test_windows_fill_the_tokens(n: int, length: int) -> None:
    if n <= length:
        with pytest.raises(DataError):
            num_windows(counting(n), length)
    else:
        used = num_windows(counting(n), length) * length + 1
        assert used <= n < used + length


def test_targets_are_the_tokens_one_further() -> None:
    batch = Batches(counting(100), 7, 5, seed=0).batch(3)
    assert torch.equal(batch["targets"], batch["tokens"] + 1)
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert all(start % 7 == 0 for start in batch["tokens"][:, 0].tolist())


def test_resume_needs_only_the_step() -> None:
    tokens = counting(1000)
    run = Batches(tokens, 8, 6, seed=4)
    before = [run.batch(step, 1, 2)["tokens"] for step in range(60)]  # nearly three epochs
    resumed = Batches(tokens, 8, 6, seed=4)
    for step in (59, 21, 20, 0):
        assert torch.equal(resumed.batch(step, 1, 2)["tokens"], before[step])


def test_seed_changes_the_order() -> None:
    first, second = (Batches(counting(1000), 8, 6, seed).batch(0)["tokens"] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_a_step_may_be_larger_than_an_epoch() -> None:
    assert sorted(Batches(counting(5), 2, 6, seed=0).batch(0)["tokens"][:, 0].tolist()) == [0, 0, 0, 2, 2, 2]


def test_a_billion_windows_cost_no_more_than_a_batch() -> None:
    # An array of stride 0 stands for 4 TB of tokens.
    tokens = np.broadcast_to(np.uint8(7), (10**12,))
    batches = Batches(tokens, 1000, 4, seed=0)
    assert batches.num_windows == 999_999_999
    assert batches.batch(10**9)["tokens"].shape == (4, 1000)
    assert len(set(batches.windows(10**9).tolist())) == 4


def test_any_unsigned_dtype_becomes_int64() -> None:
    for dtype in (np.uint8, np.uint16, np.uint32):
        top = np.full(10, np.iinfo(dtype).max, dtype=dtype)
        assert Batches(top, 3, 1, seed=0).batch(0)["tokens"].unique().tolist() == [np.iinfo(dtype).max]


def test_batches_can_be_written_to() -> None:
    tokens = counting(10)
    tokens.flags.writeable = False
    batch = Batches(tokens, 3, 1, seed=0).batch(0)
    batch["tokens"].zero_()
    assert not torch.equal(batch["tokens"], batch["targets"]) and tokens[1] == 1


@pytest.mark.parametrize(
    ("global_batch", "dp", "message", "hint"),
    [
        (
            12,
            5,
            "12 cannot be shared evenly by 5",
            "one of 1, 2, 3, 4, 6, 12; or data.global_batch to 10 or 15.",
        ),
        (2, 3, "2 has fewer samples than there are dp ranks, 3", "one of 1, 2; or data.global_batch to 3."),
    ],
)
def test_an_uneven_share_is_refused_with_what_would_work(global_batch: int, dp: int, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Batches(counting(100), 4, global_batch, seed=0).batch(0, 0, dp)
    assert message in caught.value.message and hint in caught.value.hint
    assert caught.value.where == "data.global_batch"
    check_dp(global_batch, global_batch)


@pytest.mark.parametrize(("step", "index", "dp"), [(-1, 0, 1), (0, 2, 2), (0, -1, 2)])
def test_places_that_are_not_are_refused(step: int, index: int, dp: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} of dp rank {index} of {dp}"):
        Batches(counting(100), 4, 4, seed=0).batch(step, index, dp)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="8 tokens, where a sequence of 8 needs 9"):
        Batches(counting(8), 8, 1, seed=0)
    with pytest.raises(DataError, match="0 tokens"):
        Batches(counting(0), 8, 1, seed=0)
    assert Batches(counting(9), 8, 1, seed=0).num_windows == 1


@settings(deadline=None)
@given(
    n=st.integers(4, 200),
    length=st.integers(1, 3),
    size=st.integers(1, 9),
    limit=st.none() | st.integers(0, 40),
    dp=st.integers(1, 5),
)
def test_heldout_windows_are_counted_once_over_all_ranks(
    n: int, length: int, size: int, limit: int | None, dp: int
) -> None:
    ranks = [list(heldout_batches(counting(n), length, size, limit, index, dp)) for index in range(dp)]
    assert len({tuple(batch["tokens"].shape for batch in rank) for rank in ranks}) == 1
    assert all(0 < len(batch["tokens"]) <= size for batch in ranks[0])
    counted = [
        target
        for rank in ranks
        for batch in rank
        for target in batch["targets"].flatten().tolist()
        if target != IGNORED
    ]
    windows = num_windows(counting(n), length)
    windows = windows if limit is None else min(windows, limit)
    assert sorted(counted) == list(range(1, windows * length + 1))


def test_heldout_windows_come_in_order() -> None:
    first, second = heldout_batches(counting(22), 3, 4)
    assert first["tokens"][:, 0].tolist() == [0, 3, 6, 9] and second["tokens"][:, 0].tolist() == [
        12,
        15,
        18,
        0,
    ]
    assert torch.equal(first["targets"], first["tokens"] + 1)
    assert second["targets"][3].tolist() == [IGNORED] * 3 and IGNORED not in second["targets"][:3]
