"""Where what an offloaded optimizer keeps over steps is kept: host memory, or files."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from zero3d.mapped import fresh
from zero3d.offload.disk import StateFiles

HOST = torch.device("cpu")


class Memory(Protocol):
    """Flat or shaped tensors that live as long as the run. `kind`: what their bytes count as."""

    kind: str

    def keep(self, name: str, value: Tensor) -> Tensor:
        """A copy of `value` that lives here; `name` is its own."""
        ...

    def zeros(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """The same of zeros [numel]."""
        ...

    def ahead(self, tensors: Iterable[Tensor]) -> None:
        """These are wanted soon."""
        ...

    def behind(self, tensors: Iterable[Tensor]) -> None:
        """These are done with for now."""
        ...

    def close(self) -> None: ...


class HostMemory:
    """Memory of the process itself. kind: what it counts as, on paper also "disk"."""

    def __init__(self, kind: str = "host") -> None:
        self.kind = kind

    def keep(self, name: str, value: Tensor) -> Tensor:
        return self.zeros(name, value.numel(), value.dtype).view(value.shape).copy_(value)

    def zeros(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        return fresh(numel, dtype, HOST)

    def ahead(self, tensors: Iterable[Tensor]) -> None:
        return None

    def behind(self, tensors: Iterable[Tensor]) -> None:
        return None

    def close(self) -> None:
        return None


class FileMemory:
    """Files of this rank: the kernel reads ahead what is wanted soon, and writes behind what is done with."""

    kind = "disk"

    def __init__(self, files: StateFiles) -> None:
        self._files = files

    def keep(self, name: str, value: Tensor) -> Tensor:
        kept = self._files.adopt(name, value)
        self._files.behind([kept])
        return kept

    def zeros(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        return self._files.tensor(name, numel, dtype)

    def ahead(self, tensors: Iterable[Tensor]) -> None:
        self._files.ahead(tensors)

    def behind(self, tensors: Iterable[Tensor]) -> None:
        self._files.behind(tensors)

    def close(self) -> None:
        self._files.close()
