"""(step, dp index) -> batch, without state: any rank can compute any step's batch at once.

Tokens are seen as windows that do not overlap: window w trains on tokens w T to w T + T - 1, and its targets
are the tokens one further. Sample g of the run, counted over all steps, is the window at place g mod n of a
random order of the n windows, another one for each epoch g div n. A step takes the next `global_batch`
samples; dp rank i takes the i-th of `dp_size` equal parts. So the global batch does not depend on the layout,
and resuming needs only the step.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zero3d.data.permutation import shuffled
from zero3d.data.tokenizers import TokenIds
from zero3d.errors import ConfigError, DataError

IGNORED = -100
"""A target that is not counted."""


class Batches:
    """Training batches from tokens [n], such as `Prepared.train`.

    DataError: fewer than sequence_length + 1 tokens.
    """

    def __init__(self, tokens: TokenIds, sequence_length: int, global_batch: int, seed: int) -> None:
        self.num_windows = num_windows(tokens, sequence_length)
        self.sequence_length = sequence_length
        self.global_batch = global_batch
        self._tokens = tokens
        self._seed = seed

    def batch(self, step: int, dp_index: int = 0, dp_size: int = 1) -> dict[str, Tensor]:
        """This dp rank's part of a step's global batch (steps count from 0).

        {"tokens": int64 [b, T], "targets": int64 [b, T]} with b = global_batch / dp_size.
        ConfigError: see `check_dp`.
        """
        check_dp(self.global_batch, dp_size)
        if step < 0 or not 0 <= dp_index < dp_size:
            raise ValueError(f"there is no step {step} of dp rank {dp_index} of {dp_size}")
        windows = self.windows(step)
        size = self.global_batch // dp_size
        return _gather(self._tokens, windows[dp_index * size : (dp_index + 1) * size], self.sequence_length)

    def windows(self, step: int) -> npt.NDArray[np.int64]:
        """Numbers [global_batch] of the windows of a step, in the order of its samples."""
        first = step * self.global_batch
        samples = range(first, first + self.global_batch)
        parts = []
        for epoch in range(samples.start // self.num_windows, (samples.stop - 1) // self.num_windows + 1):
            start = max(samples.start - epoch * self.num_windows, 0)
            stop = min(samples.stop - epoch * self.num_windows, self.num_windows)
            parts.append(shuffled(np.arange(start, stop), self.num_windows, seed=self._seed, epoch=epoch))
        return np.concatenate(parts)


def num_windows(tokens: TokenIds, sequence_length: int) -> int:
    """Windows that do not overlap; the tokens behind the last are left out. DataError: not even one."""
    count = (len(tokens) - 1) // sequence_length
    if count < 1:
        raise DataError(
            f"{len(tokens)} tokens, where a sequence of {sequence_length} needs {sequence_length + 1}",
            where="data.sequence_length",
            hint="Give more text, or a smaller data.sequence_length.",
        )
    return count


def check_dp(global_batch: int, dp_size: int) -> None:
    """ConfigError: the global batch cannot be shared evenly by the dp ranks."""
    if global_batch % dp_size == 0:
        return
    if global_batch < dp_size:
        what = f"data.global_batch = {global_batch} has fewer samples than there are dp ranks, {dp_size}"
        near = f"{dp_size}"
    else:
        what = f"data.global_batch = {global_batch} cannot be shared evenly by {dp_size} dp ranks"
        below = global_batch // dp_size * dp_size
        near = f"{below} or {below + dp_size}"
    sizes = ", ".join(str(size) for size in range(1, global_batch + 1) if global_batch % size == 0)
    raise ConfigError(
        what,
        where="data.global_batch",
        hint=f"Set parallel.dp to one of {sizes}; or data.global_batch to {near}.",
    )


def heldout_batches(
    tokens: TokenIds,
    sequence_length: int,
    samples_at_a_time: int,
    limit: int | None = None,
    dp_index: int = 0,
    dp_size: int = 1,
) -> Iterator[dict[str, Tensor]]:
    """The first `limit` windows (all, when None) in order, in batches of up to `samples_at_a_time`.

    Window w is evaluated by dp rank w mod dp_size. All ranks get the same number of batches, all of one
    shape, as they compute each batch together: where windows run out, a batch is filled up with window 0, its
    targets IGNORED. Over all ranks each window is counted once, so sums do not depend on dp_size.
    """
    count = num_windows(tokens, sequence_length)
    count = count if limit is None else min(count, limit)
    per_rank = -(-count // dp_size)
    num_batches = -(-per_rank // samples_at_a_time)
    size = -(-per_rank // num_batches) if num_batches else 0
    for number in range(num_batches):
        places = np.arange(number * size, (number + 1) * size)
        windows = places * dp_size + dp_index
        # With the batches evened out, the last places may lie behind this rank's last window.
        real = windows < count
        batch = _gather(tokens, np.where(real, windows, 0), sequence_length)
        batch["targets"][torch.from_numpy(~real)] = IGNORED
        yield batch


def _gather(tokens: TokenIds, windows: npt.NDArray[np.int64], length: int) -> dict[str, Tensor]:
    rows = np.stack([tokens[start : start + length + 1] for start in windows * length]).astype(np.int64)
    return {
        "tokens": torch.from_numpy(np.ascontiguousarray(rows[:, :-1])),
        "targets": torch.from_numpy(np.ascontiguousarray(rows[:, 1:])),
    }
