"""A hub folder as a state that an engine loads: `engine.load_state_dict(HubState(folder, engine.parameters))`.

(A new engine begins with such a folder by `zero3d.pretrained`, which also knows what Transformers renames and fuses.)
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from zero3d.models.weight_files import WeightFiles
from zero3d.params import ParamInfo


class HubState(Mapping[str, Tensor]):
    """The tensors in `folder` by their names, each read when it is asked for. parameters: the model's; a tied one that
    the files have under one of its names is here under all.

    UsageError: the folder has no safetensors files, or they are broken.
    """

    def __init__(self, folder: str | os.PathLike[str], parameters: Sequence[ParamInfo]) -> None:
        self._files = WeightFiles(Path(folder))
        self._there = {name: name for name in self._files.names}
        for info in parameters:
            names = (info.name, *info.ties)
            there = next((name for name in names if name in self._there), None)
            if there is not None:
                self._there.update({name: there for name in names if name not in self._there})

    def __getitem__(self, name: str) -> Tensor:
        return self._files.read(self._there[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)
