"""Parameters of a model in stages: those of other stages are not here, and come from their ranks when asked for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zero3d import params
from zero3d.contracts import Axis
from zero3d.errors import ReleasedParameterError
from zero3d.params import ParamInfo
from zero3d.pipeline.cut import Stages
from zero3d.zero.guard import Guard

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


class Placed:
    """The parameters of `model` over `axis`, pp, as `stages` says."""

    def __init__(self, model: nn.Module, stages: Stages, axis: Axis, device: torch.device) -> None:
        self._model = model
        self._stages = stages
        self._axis = axis
        self._device = device
        self._elsewhere = [info for info in params.collect(model) if not stages.has(info.name)]
        self._leave_out()

    def has(self, name: str) -> bool:
        return self._stages.has(name)

    def counts(self, name: str) -> bool:
        """Whether this rank is the first of pp that has parameter `name`: over pp each counts once."""
        return self._stages.ranks_of(name)[0] == self._axis.index

    def shared(self) -> dict[str, Sequence[int]]:
        """Parameters that several ranks of pp have -> their indices."""
        found = {name: self._stages.ranks_of(name) for name in self._stages.stages_of}
        return {name: ranks for name, ranks in found.items() if len(ranks) > 1}

    def share(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """What `read` gives on a rank that has parameter `name`, on all ranks, flat. Collective."""
        mine = read() if self.has(name) else None
        if self._axis.size == 1:
            assert mine is not None
            return mine
        root = self._stages.ranks_of(name)[0]
        told = [0, 0] if mine is None else [mine.numel(), DTYPES.index(mine.dtype)]
        size = torch.tensor(told, dtype=torch.int64, device=self._device)
        self._axis.broadcast(size, root, f"size of {name}").wait()
        numel, dtype = size.tolist()
        flat = torch.empty(numel, dtype=DTYPES[dtype], device=self._device)
        if mine is not None:
            flat.copy_(mine.view(-1))
        if numel:
            self._axis.broadcast(flat.view(torch.uint8), root, f"value of {name}").wait()
        return flat

    @contextmanager
    def together(self, infos: Sequence[ParamInfo]) -> Iterator[None]:
        """All parameters are there, if those of this rank are whole. Entering is collective."""
        shapes = {info.name: info.shape for info in infos}
        came = {
            name: self.share(name, lambda name=name: self._model.get_parameter(name).detach())  # type: ignore[misc]
            for name in (self._stages.stages_of if self._axis.size > 1 else ())
        }
        self._bring_buffers()
        for info in self._elsewhere:
            self._replace(info, came[info.name].view(shapes[info.name]))
        try:
            yield
        finally:
            self._leave_out()

    @torch.no_grad()
    def _bring_buffers(self) -> None:
        """Those of other stages are as their own stage left them."""
        for name, buffer in self._model.named_buffers() if self._axis.size > 1 else ():
            if buffer.numel():
                value = buffer.contiguous()
                root = self._stages.rank_of_buffer(name)
                self._axis.broadcast(value.view(-1).view(torch.uint8), root, f"buffer {name}").wait()
                buffer.copy_(value)

    def _leave_out(self) -> None:
        """What is elsewhere has a shape and a dtype, and says where it is when it is touched."""
        left = [(info.name, self._replace(info, _without_data(info))) for info in self._elsewhere]
        Guard(left, _say_where).close()

    def _replace(self, info: ParamInfo, value: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(value, requires_grad=info.trainable)
        params.replace(self._model, info, parameter)
        return parameter


def _without_data(info: ParamInfo) -> Tensor:
    return torch.empty(info.shape, dtype=info.dtype, device="meta")


def _say_where(name: str) -> None:
    raise ReleasedParameterError(
        f"parameter {name} is on another pipeline stage",
        hint="Read it with engine.weight_of(name), or inside `with engine.gathered():`, on every rank.",
    )
