"""An axis of ranks that nobody has started: what a rank would hold can be known without them."""

from torch import Tensor

from zero3d.comm.done import DONE, Done


class PaperAxis:
    """An `Axis` of any size on which nothing moves: every call is done at once and leaves its buffers as they are."""

    one_call_sums = False

    def __init__(self, size: int, index: int = 0) -> None:
        self.size = size
        self.index = index

    def held(self) -> tuple[Tensor, ...]:
        return ()

    def all_gather(self, out: Tensor, part: Tensor, label: str) -> Done:
        return DONE

    def reduce_scatter(self, out: Tensor, whole: Tensor, label: str, *, add: bool = False) -> Done:
        return DONE

    def all_reduce(self, tensor: Tensor, label: str) -> Done:
        return DONE

    def broadcast(self, tensor: Tensor, root: int, label: str) -> Done:
        return DONE

    def send(self, tensor: Tensor, to: int, label: str) -> Done:
        return DONE

    def recv(self, tensor: Tensor, source: int, label: str) -> Done:
        return DONE
