"""A torch optimizer over tensors on the host."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zero3d.mapped import address
from zero3d.offload.adamw import HostAdamW, Workers
from zero3d.optim.inner import Inner
from zero3d.optim.rule import Rule

Place = Callable[[int, str, torch.dtype], Tensor]


class HostInner(Inner):
    """Reads gradients of any dtype, which it leaves as they are, and writes new weights in any dtype besides.

    torch's Adam and AdamW run in chunks, in one pass over memory; any other optimizer as it is.
    """

    def __init__(self, rule: Rule, named: Sequence[tuple[str, Tensor]], workers: Workers, make: Place) -> None:
        """make: gives the memory of state `key`, of a dtype, of the tensor at an index"""
        super().__init__(rule, named)
        place = {id(tensor): index for index, tensor in enumerate(self._tensors)}

        def made(tensor: Tensor, key: str) -> Tensor:
            value = make(place[id(tensor)], key, tensor.dtype)
            self._kept.add(address(value))
            return value

        chunked = HostAdamW.takes(self._optimizer)
        self._chunked = HostAdamW(self._optimizer, workers, self._tensors, made) if chunked else None
        self._kept: set[tuple[int, int]] = set()

    def step_into(
        self, gradients: Sequence[Tensor | None], outs: Sequence[Tensor | None], lr: float, scale: float
    ) -> None:
        """One update with gradients times `scale`; `outs` become the new weights. The same bits as `Inner` on the
        device: what scales as it reads, and in which dtype, is the same."""
        if self._chunked is not None:
            self.set_lr(lr)
            self._chunked.step(gradients, scale, outs)
            # The memory of `outs` has other things in it where nothing is written.
            outs = [out if gradient is None else None for gradient, out in zip(gradients, outs)]
            self._copy(outs)
            return
        scales = self.can_scale and all(one is None or one.dtype == torch.float32 for one in gradients)
        scaled = [None if one is None else _widened(one, None if scales else scale) for one in gradients]
        self.step(scaled, lr, scale if scales else None)
        self._copy(outs)

    def _copy(self, outs: Sequence[Tensor | None]) -> None:
        for tensor, out in zip(self._tensors, outs):
            if out is not None:
                out.copy_(tensor)

    def fresh_state(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """State of elements that the optimizer made since it was asked last."""
        for key, value in list(self._optimizer.state.get(self._tensors[index], {}).items()):
            if isinstance(value, Tensor) and value.dim() and address(value) not in self._kept:
                yield key, value

    def replace_state(self, index: int, key: str, value: Tensor) -> None:
        self._kept.add(address(value))
        self._optimizer.state[self._tensors[index]][key] = value


def _widened(gradient: Tensor, scale: float | None) -> Tensor:
    wide = gradient.to(torch.float32, copy=True)
    return wide if scale is None else wide.mul_(scale)
