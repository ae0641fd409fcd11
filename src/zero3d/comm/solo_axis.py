"""The axis of one rank: every call is done when it returns."""

from torch import Tensor

from zero3d.comm.done import DONE, Done
from zero3d.mapped import address


class SoloAxis:
    """An `Axis` of size 1."""

    size = 1
    index = 0
    one_call_sums = True

    def held(self) -> tuple[Tensor, ...]:
        return ()

    def all_gather(self, out: Tensor, part: Tensor, label: str) -> Done:
        return _copy(out, part)

    def reduce_scatter(self, out: Tensor, whole: Tensor, label: str, *, add: bool = False) -> Done:
        if add:
            out.add_(whole)
            return DONE
        return _copy(out, whole)

    def all_reduce(self, tensor: Tensor, label: str) -> Done:
        return DONE

    def broadcast(self, tensor: Tensor, root: int, label: str) -> Done:
        return DONE

    def send(self, tensor: Tensor, to: int, label: str) -> Done:
        raise ValueError(f"{label}: an axis of one rank has nobody to send to")

    def recv(self, tensor: Tensor, source: int, label: str) -> Done:
        raise ValueError(f"{label}: an axis of one rank has nobody to receive from")


def _copy(out: Tensor, source: Tensor) -> Done:
    if address(out) != address(source):
        out.copy_(source)
    return DONE
