"""A folder of safetensors files: which tensors there are, each read when it is asked for.

Files are mapped, so reading takes no memory of the process' own until the tensor is copied somewhere.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from zero3d.errors import UsageError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class WeightFiles:
    """The tensors of `place`: a safetensors file, or a folder with one, or with several and their index.

    Raises `UsageError` for a place without any, or with files that are missing or broken.
    """

    def __init__(self, place: Path) -> None:
        self._files = _files_by_name(place)
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def read(self, name: str) -> Tensor:
        """The tensor as it is in its file; not to be written to."""
        file = self._files[name]
        with _explained(file):
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        return tensor


def _files_by_name(place: Path) -> dict[str, Path]:
    index = place / INDEX
    if not index.is_file():
        file = _single(place)
        return dict.fromkeys(_names_in(file), file)
    try:
        listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: place / file for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{index} is no index of safetensors files: {error!r}",
            hint='It must have {"weight_map": {name of a tensor: name of a file}}.',
        ) from error
    there = {file: set(_names_in(file)) for file in dict.fromkeys(files.values())}
    for name, file in files.items():
        if name not in there[file]:
            raise UsageError(f"{file} has no tensor {name}, which {INDEX} says it has", hint="Fetch the files again.")
    return files


def _single(place: Path) -> Path:
    if place.is_file():
        return place
    if not place.is_dir():
        raise UsageError(
            f"there is no folder {place}",
            hint="Give a local folder; huggingface_hub.snapshot_download(name) fetches one and returns its path.",
        )
    found = [place / SINGLE] if (place / SINGLE).is_file() else sorted(place.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{place} has {len(found)} safetensors files and no {INDEX}", hint="Name one of the files.")
    raise UsageError(
        f"{place} has no safetensors file",
        hint=f"Expected are {SINGLE}, or {INDEX} and what it lists. Pickled weights (.bin, .pt) are not read: "
        "load them with Transformers once, and save_pretrained writes safetensors.",
    )


def _names_in(file: Path) -> Iterator[str]:
    with _explained(file), safe_open(file, framework="pt") as opened:
        yield from opened.keys()


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} cannot be read: {error}", hint="Is it there, and whole?") from error
