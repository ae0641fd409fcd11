"""The manifest, out of what the ranks told of the pieces in their files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zero3d.checkpoint.manifest import Entry, File, Manifest, Number, Scaling, Sizes, What, problems
from zero3d.checkpoint.state import Holdings
from zero3d.checkpoint.write import NAMES
from zero3d.errors import UsageError

Merged = dict[tuple[str, str, str], Entry]


def merge(
    holdings: Holdings,
    layout: Sizes,
    described: Sequence[str],
    *,
    step: int,
    what: What,
    learning_rate: float,
    scaler: Scaling,
    extra: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Manifest:
    """described: by rank, what `mine.Mine.write` gave. UsageError: `extra` or `config` is not of JSON's types."""
    files: list[File] = []
    numbers: dict[str, dict[str, Number]] = {}
    merged: Merged = {}
    for text in described:
        told = json.loads(text)
        for entry in (Entry.model_validate_json(json.dumps(one)) for one in told["tensors"]):
            _add(merged, entry, len(files))
        for name, of in told["numbers"].items():
            numbers.setdefault(name, {}).update({key: Number(**one) for key, one in of.items()})
        if told["file"]:
            files.append(File(**told["file"]))
    manifest = Manifest(
        step=step,
        what=what,
        layout=layout,
        learning_rate=learning_rate,
        scaler=scaler,
        config=of_json(config, "config"),
        extra=of_json(extra, "extra"),
        numbers=numbers,
        tensors=list(_in_order(merged, holdings, what)),
        files=files,
    )
    assert not (found := next(problems(manifest), None)), found
    return manifest


def _add(merged: Merged, entry: Entry, file: int) -> None:
    before = merged.setdefault((entry.kind, entry.name, entry.key), entry.model_copy(update={"parts": []}))
    assert (before.shape, before.dtype, before.dim) == (entry.shape, entry.dtype, entry.dim), entry.label
    for one in entry.parts:
        pieces = [piece.model_copy(update={"file": file}) for piece in one.pieces]
        same = next((part for part in before.parts if part.ranges == one.ranges), None)
        if same is None:
            before.parts.append(one.model_copy(update={"pieces": pieces}))
        else:
            same.pieces.extend(pieces)


def _in_order(merged: Mapping[tuple[str, str, str], Entry], holdings: Holdings, what: What) -> Iterator[Entry]:
    """Every tensor that there is, those without elements too, of which no rank has a piece."""
    for info in holdings.infos.values():
        if info.trainable or what != "trainable":
            dtype = NAMES[torch.float32 if info.trainable else info.dtype]
            none = Entry(kind="weight", name=info.name, shape=list(info.shape), dtype=dtype, parts=[])
            found = merged.get(("weight", info.name, ""), none)
            told = {"made": NAMES.get(info.dtype), "trainable": info.trainable, "ties": list(info.ties)}
            yield found.model_copy(update=told)
    yield from sorted((one for one in merged.values() if one.kind == "state"), key=lambda one: one.key)
    for name, buffer in holdings.buffer_names.items():
        none = Entry(kind="buffer", name=name, shape=list(buffer.shape), dtype=NAMES[buffer.dtype], parts=[])
        yield merged.get(("buffer", name, ""), none)


def of_json(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`values` as they come back. UsageError: JSON cannot hold them; `name`: what errors call them."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} cannot be saved: {error}", hint="It may hold what JSON can.") from error
    return found
