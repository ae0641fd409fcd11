"""Dropout that depends on (seed, step, micro-batch, dp index, block) alone.

Before and after each block's forward the generator is set from these five numbers: what a block draws shows nowhere
else, and what is drawn between blocks is the same on ranks that have other blocks. Where activations are cut over
tensor-parallel ranks each rank draws from a stream of its own. No history: any layout draws the same, and a resumed run
needs no generator state. The user's own generator is put back after the step.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero3d.recompute import in_backward, untraced

_MASK = (1 << 64) - 1
AFTER = 1 << 32
"""Added to a block's number for what comes after it."""


class Randomness:
    """Sets the generators of the CPU and of `device` as a step goes along."""

    def __init__(self, seed: int, dp_index: int, device: torch.device, tp_index: int = 0) -> None:
        self._fixed = (seed, dp_index)
        self._tp_index = tp_index
        self._device = device
        self._apart = False
        self._cut_seed = -1
        self._whole: list[Tensor] = []
        self._step = 0
        self._micro_batch: int | None = None
        self._mixed = 0
        self._hooks: list[RemovableHandle] = []

    def watch(self, model: nn.Module, blocks: Sequence[nn.Module], *, apart: bool = False) -> None:
        """`apart`: what blocks compute is cut everywhere."""
        self._apart = apart
        hook = untraced(model)
        for number, block in enumerate(blocks):
            self._hooks.append(block.register_forward_pre_hook(hook(self._hook(number + 1))))
            self._hooks.append(block.register_forward_hook(hook(self._hook(number + AFTER))))

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
        self._mixed = _state_of((*self._fixed, self._step, micro_batch))
        self._set(0)

    def skip(self, block: int) -> None:
        """Block `block` runs elsewhere: what comes after it draws what it would draw there."""
        if self._micro_batch is not None:
            self._set(block + AFTER)

    def enter_cut(self) -> None:
        """Activations are cut from here on. All comes from the generator's own state, which a recomputation
        restores."""
        if self._micro_batch is None or self._apart or torch.default_generator.initial_seed() == self._cut_seed:
            return
        drawn = int(torch.randint(1 << 62, (), generator=torch.default_generator))
        self._cut_seed = mixed(drawn, self._tp_index)
        self._whole = [generator.get_state() for generator in self._generators()]
        for generator in self._generators():
            generator.manual_seed(self._cut_seed)

    def leave_cut(self) -> None:
        """They are whole again, and what is drawn is the same on all tensor-parallel ranks."""
        if self._whole and torch.default_generator.initial_seed() == self._cut_seed:
            for generator, state in zip(self._generators(), self._whole):
                generator.set_state(state)

    def _hook(self, number: int) -> Any:
        def set_before_block(*_: Any) -> None:
            # A recomputation restores the state that the block's first forward began with.
            if self._micro_batch is not None and not in_backward():
                self._set(number)

        return set_before_block

    def _set(self, block: int) -> None:
        # The numbers that stay as they are over a micro-batch are mixed in already.
        numbers = (block, self._tp_index) if self._apart and 0 < block < AFTER else (block,)
        seed = _state_of(numbers, self._mixed) >> 1
        for generator in self._generators():
            generator.manual_seed(seed)

    def _generators(self) -> list[torch.Generator]:
        found = [torch.default_generator]
        if self._device.type == "cuda":
            found.append(torch.cuda.default_generators[self._device.index or 0])
        return found


def mixed(*numbers: int) -> int:
    """A 63-bit number that looks unrelated for any other `numbers` (the finaliser of splitmix64, chained)."""
    return _state_of(numbers) >> 1


def _state_of(numbers: Iterable[int], state: int = 0) -> int:
    """What `numbers` make of `state`: those of two calls after another what all would in one."""
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
