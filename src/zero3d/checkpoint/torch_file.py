"""The one file with pickle in it, for programs that read no safetensors; it is asked for by name.

It holds a plain dict of tensors, which `torch.load(..., weights_only=True)` reads: no code of anybody's.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from zero3d.checkpoint.hub import HubFile, Weight

NAME: Final = "pytorch_model.bin"


def save(source: Path, described: HubFile) -> None:
    """Writes the tensors of the safetensors file `source` beside it, and removes that. All names of a tie are there,
    with one value. Tensors are mapped, so they take no memory of the process' own. OSError: it cannot be written."""
    target = source.with_name(NAME)
    state = dict(_tensors(source, described))
    try:
        with open(target, "xb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())
    except RuntimeError as error:  # What torch's writer makes of an OSError.
        if isinstance(error.__cause__ or error.__context__, OSError):
            raise (error.__cause__ or error.__context__) from error  # type: ignore[misc]
        raise OSError(errno.EIO, str(error).splitlines()[0], str(target)) from error
    source.unlink()


def _tensors(source: Path, described: HubFile) -> Iterator[tuple[str, Tensor]]:
    for weight, offset in described.offsets():
        tensor = _mapped(source, weight, offset)
        for name in (weight.name, *weight.ties):
            yield name, tensor


def _mapped(source: Path, weight: Weight, offset: int) -> Tensor:
    if not weight.numel:
        return torch.empty(tuple(weight.shape), dtype=weight.dtype)
    # "c": may be written to in memory alone, else torch warns of what cannot be.
    raw = np.memmap(source, dtype=np.uint8, mode="c", offset=offset, shape=(weight.nbytes,))
    return torch.from_numpy(raw).view(weight.dtype).view(tuple(weight.shape))
