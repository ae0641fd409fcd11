"""Dropout that depends on (seed, step, micro-batch, dp index, block) alone.

Before each block's forward the generator is set from these five numbers; what comes between blocks goes on from
the block before. No history: any layout draws the same, and a resumed run needs no generator state. The user's own
generator is put back after the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero3d.recompute import in_backward, untraced

_MASK = (1 << 64) - 1


class Randomness:
    """Sets the generators of the CPU and of `device` as a step goes along."""

    def __init__(self, seed: int, dp_index: int, device: torch.device) -> None:
        self._fixed = (seed, dp_index)
        self._device = device
        self._step = 0
        self._micro_batch: int | None = None
        self._hooks: list[RemovableHandle] = []

    def watch(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._hooks = [
            block.register_forward_pre_hook(untraced(model)(self._hook(number)))
            for number, block in enumerate(blocks, start=1)
        ]

    def close(self) -> None:
        """Watches no more."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Round one training step."""
        devices = [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(devices=devices):
            self._step = step
            yield
            self._micro_batch = None

    def enter(self, micro_batch: int) -> None:
        """A forward of the model begins; what comes before the first block is block 0."""
        self._micro_batch = micro_batch
        self._set(0)

    def _hook(self, number: int) -> Any:
        def set_before_block(*_: Any) -> None:
            # A recomputation restores the state that the block's first forward began with.
            if self._micro_batch is not None and not in_backward():
                self._set(number)

        return set_before_block

    def _set(self, block: int) -> None:
        assert self._micro_batch is not None
        seed = mixed(*self._fixed, self._step, self._micro_batch, block)
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)


def mixed(*numbers: int) -> int:
    """A 63-bit number that looks unrelated for any other `numbers` (the finaliser of splitmix64, chained)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
