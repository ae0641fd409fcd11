"""A folder as the Hugging Face hub has them: weights under the model's own names, whole, in files that Transformers and
many others read.

    model.safetensors                   or, where that would be too large,
    model-00001-of-00003.safetensors    several, and
    model.safetensors.index.json        which tensor is in which
    config.json                         where the model has one

Of tied names the first stands for all, as in what Transformers saves. Files have other names until all are written.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import nn

from zero3d.checkpoint.write import NAMES, PLACE
from zero3d.errors import UsageError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
KEPT_CONFIG: Final = "model_config"
"""Under which a checkpoint's `extra` has what `config_of` gave."""
SHARD_BYTES: Final = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor of the model as it is written. ties: its other names."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    ties: Sequence[str] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One safetensors file: its weights in the order in which they lie after the header."""

    name: str
    header: bytes
    weights: Sequence[Weight]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(one.nbytes for one in self.weights)

    def offsets(self) -> Iterator[tuple[Weight, int]]:
        """Each weight, and the byte at which it begins."""
        at = len(self.header)
        for one in self.weights:
            yield one, at
            at += one.nbytes


def in_files(weights: Sequence[Weight], shard_bytes: int = SHARD_BYTES) -> list[HubFile]:
    """Files of at most `shard_bytes`, a larger tensor by itself; in the order in which they are written."""
    strange = next((one for one in weights if one.dtype not in NAMES), None)
    if strange is not None:
        raise UsageError(
            f"{strange.name} is {strange.dtype}, which safetensors files cannot hold",
            hint="Keep it as real numbers, or register the buffer with persistent=False.",
        )
    groups: list[list[Weight]] = [[]]
    room = shard_bytes
    for one in weights:
        if groups[-1] and one.nbytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(one)
        room -= one.nbytes
    number = len(groups)
    names = [SINGLE] if number == 1 else [f"model-{at:05d}-of-{number:05d}.safetensors" for at in range(1, number + 1)]
    return [_file(name, group) for name, group in zip(names, groups, strict=True)]


def index(files: Sequence[HubFile]) -> str:
    """The text of model.safetensors.index.json."""
    weights = [(one, file.name) for file in files for one in file.weights]
    metadata = {
        "total_parameters": sum(one.numel for one, _ in weights),
        "total_size": sum(one.nbytes for one, _ in weights),
    }
    return json.dumps({"metadata": metadata, "weight_map": {one.name: name for one, name in weights}}, indent=2) + "\n"


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """What config.json says of a Transformers model; None of others."""
    if not any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__):
        return None
    config: Any = getattr(model, "config", None)
    found: dict[str, Any] = json.loads(config.to_json_string())
    return {"architectures": [type(model).__name__], **{key: one for key, one in found.items() if one is not None}}


def with_dtype(config: Mapping[str, Any], weights: Sequence[Weight]) -> dict[str, Any]:
    """The same with the dtype that most of the weights have: readers take it from here."""
    numel: dict[torch.dtype, int] = {}
    for one in weights:
        if one.dtype.is_floating_point:
            numel[one.dtype] = numel.get(one.dtype, 0) + one.numel
    if not numel:
        return dict(config)
    name = str(max(numel, key=lambda dtype: numel[dtype])).removeprefix("torch.")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: name}


def _file(name: str, weights: Sequence[Weight]) -> HubFile:
    # Wide elements come first, so that each lies at a multiple of its width; else the order stays.
    ordered = sorted(weights, key=lambda one: -one.dtype.itemsize)
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in ordered:
        described[one.name] = {
            "dtype": NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [at, at + one.nbytes],
        }
        at += one.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PLACE)
    return HubFile(name=name, header=len(text).to_bytes(8, "little") + text, weights=ordered)
