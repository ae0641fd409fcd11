"""Outputs of a model, from the rank that computed them to all that share the replica."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero3d.comm.texts import everyones_text
from zero3d.contracts import Axis
from zero3d.pipeline.specs import describe, rebuild
from zero3d.trees import map_tensors, tensors_in


def joined(outputs: Sequence[Any]) -> Any:
    """Outputs of micro-batches -> as of one batch: tensors side by side along their first dim, 0-dim ones in a row."""
    if not outputs:
        return None
    columns = zip(*(tensors_in(output) for output in outputs), strict=True)
    whole = iter([torch.cat(column) if column[0].dim() else torch.stack(column) for column in columns])
    return map_tensors(lambda _: next(whole), outputs[0])


def plain(value: Any) -> Any:
    """Without what is no tensor, number, text, dict, list or tuple, such as a cache: None in its place."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value] if isinstance(value, list) else tuple(plain(one) for one in value)
    return value if value is None or isinstance(value, Tensor | bool | int | float | str) else None


def shared(output: Any, axis: Axis, root: int, device: torch.device) -> Any:
    """The `output` of rank `root` of `axis` on all of them: plain dicts, lists and tuples of tensors. Collective."""
    if axis.size == 1:
        return output
    mine: dict[str, Tensor] = {}
    text = json.dumps(describe(output, "output", mine)) if axis.index == root else ""
    spec = json.loads(everyones_text(text, axis, device, "outputs")[root])

    def send(name: str, shape: tuple[int, ...], dtype: torch.dtype, needs_gradient: bool) -> Tensor:
        tensor = mine[name].contiguous() if name in mine else torch.empty(shape, dtype=dtype, device=device)
        if tensor.numel():
            axis.broadcast(tensor.view(-1).view(torch.uint8), root, f"{name} of the model").wait()
        return tensor

    return rebuild(spec, send)
