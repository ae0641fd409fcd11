"""Flat buffers that live over steps, and windows whose memory comes and goes.

A `Pool` keeps the buffers that gathers and reductions use in turn, so that after the first steps none is
allocated. A `Window` is the whole flat buffer of a bucket as the parameters see it (they are views of it) while
its memory is lent to it only between `show` and `hide`: autograd may hold views of a window over the time in
which it has no memory. `Resting` is a flat buffer that has none at all while nobody needs it.
"""

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from zero3d.mapped import fresh


class Pool:
    """Zeroed once when made, then handed out again and again with what the last user left in them.

    `key` separates buffers whose padding must stay as it is from others of the same size.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[tuple[Hashable, ...], list[Tensor]] = {}
        self._all: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, key: Hashable = None) -> Tensor:
        free = self._free.setdefault((numel, dtype, key), [])
        if free:
            return free.pop()
        buffer = fresh(numel, dtype, self.device)
        self._all.append(buffer)
        return buffer

    def give(self, buffer: Tensor, key: Hashable = None) -> None:
        self._free[(buffer.numel(), buffer.dtype, key)].append(buffer)

    def __iter__(self) -> Iterator[Tensor]:
        """Every buffer of the pool, lent or free."""
        return iter(self._all)


class Window:
    """A flat tensor [numel] that has memory only while it is shown; tensors viewing it come and go with it.

    `part` is what is kept of it. Where that is all, and here, it `stays`: the window itself, and nothing comes or goes.
    A new window is shown, so that views of it can be made; that memory is dropped when it is first hidden.
    """

    def __init__(self, numel: int, part: Tensor, pool: Pool, *, stays: bool) -> None:
        self._pool = pool
        self._stays = stays
        self._lent: Tensor | None = None
        self.shown = True
        self.tensor = part if self._stays else fresh(numel, part.dtype, pool.device)

    def buffer(self) -> Tensor:
        """What to fill and then to `show`, not to be used otherwise until `hide`."""
        return self.tensor if self._stays else self._pool.take(self.tensor.numel(), self.tensor.dtype)

    def show(self, filled: Tensor) -> None:
        """The memory of `filled`, from `buffer`, becomes the window's."""
        assert not self.shown
        if not self._stays:
            _exchange(self.tensor, filled)
            self._lent = filled
        self.shown = True

    def hide(self) -> None:
        """The memory goes back to the pool."""
        assert self.shown
        self.shown = False
        if self._stays:
            return
        _exchange(self.tensor, self._lent if self._lent is not None else self.tensor.new_empty(0))
        if self._lent is not None:
            self._pool.give(self._lent)
        self._lent = None


class Resting:
    """A flat `tensor` that has no memory between `rest` and `wake`, which finds it zero; its views stay views of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.lent: Tensor | None = None
        """Whose memory the tensor has since it was last woken; it is empty itself meanwhile."""
        self._awake = True

    def wake(self) -> None:
        if not self._awake:
            self.lent = torch.zeros_like(self.tensor)
            _exchange(self.tensor, self.lent)
            self._awake = True

    def rest(self) -> None:
        if self._awake:
            _exchange(self.tensor, self.tensor.new_empty(0) if self.lent is None else self.lent)
            self.lent = None
            self._awake = False


def _exchange(one: Tensor, other: Tensor) -> None:
    """The memory of two storages changes places, one of them being empty; every view of either follows."""
    first, second = one.untyped_storage(), other.untyped_storage()
    if hasattr(first, "_swap_data_ptr_"):
        first._swap_data_ptr_(second)
        return
    empty, full = (first, second) if first.nbytes() == 0 else (second, first)
    empty.resize_(full.nbytes())
    empty.copy_(full)
    full.resize_(0)
