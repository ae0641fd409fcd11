"""A model that starts from weights in safetensors files, read one parameter at a time.

Every rank reads what it needs by itself, so nothing is broadcast, and no rank ever holds the whole model.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from zero3d.blueprint import Source, Values
from zero3d.errors import UsageError
from zero3d.models.conversions import Read, may_be_left_over, may_be_missing, readers
from zero3d.models.untouched import Untouched
from zero3d.models.weight_files import WeightFiles

SHOWN = 12
"""Names in a message."""


def pretrained(
    folder: str | Path,
    build: Callable[[], nn.Module],
    *,
    adapt: Callable[[nn.Module], nn.Module] | None = None,
    new: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> Source:
    """What `Engine` takes as its model: the structure that `build` makes, with the weights in `folder`.

    folder: a local folder, the same on every rank, with model.safetensors, or with shards and their index, as
        `save_pretrained` of Transformers writes them; or one safetensors file
    build: builds the model without weights, such as
        lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    adapt: what becomes of the model then, such as lambda model: get_peft_model(model, lora): it returns a model that
        holds the parameters it was given, unread, as they get their values later; what it adds begins from the seed
    new: patterns of names, with * for anything, that the files may lack: they begin from the seed ("score.*")
    unused: patterns of names that the files may have for nothing

    Raises `UsageError` for a folder without such files; and, once the model is built, for names that are missing or
    left over, for shapes that differ, for tied parameters with two values, and for an `adapt` that computes with
    weights. All are raised before any training.
    """
    files = WeightFiles(Path(folder))
    built: list[tuple[nn.Module, Mapping[str, Tensor]]] = []

    def whole() -> nn.Module:
        base = build()
        state = base.state_dict(keep_vars=True)
        tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
        built[:] = [(base, tensors)]
        if adapt is None:
            return base
        with Untouched(tensors):
            return adapt(base)

    def values(model: nn.Module) -> Mapping[str, Values]:
        # The files know the names from before `adapt`, which changes names and never the tensors themselves.
        base, tensors = built.pop()
        names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        found = _values(base, tensors, files, new, unused)
        for name in found:
            if id(tensors[name]) not in names:
                raise UsageError(
                    f"the model that `adapt` returned does not have {name}, which the files have",
                    hint="adapt must keep the parameters and buffers of the model it is given.",
                )
        return {names[id(tensors[name])]: value for name, value in found.items()}

    return Source(whole, values)


def _values(
    model: nn.Module, tensors: Mapping[str, Tensor], files: WeightFiles, new: Sequence[str], unused: Sequence[str]
) -> dict[str, Values]:
    """Of each of the model's `tensors` that the files have, by the first of its names."""
    found, left_over = readers(model, tensors, files)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    values: dict[str, Values] = {}
    missing: list[str] = []
    for same in names.values():
        reads = {name: found[name] for name in same if name in found}
        if reads:
            values[same[0]] = partial(_read, reads, tuple(tensors[same[0]].shape))
        elif not any(_fits(name, new) or may_be_missing(model, name) for name in same):
            missing.append(same[0])
    surplus = [name for name in left_over if not (_fits(name, unused) or may_be_left_over(model, name))]
    _refuse(missing, surplus)
    return values


def _read(reads: Mapping[str, Read], shape: tuple[int, ...]) -> Tensor:
    """The value that all of a tensor's names have."""
    (name, read), *others = reads.items()
    value = read()
    if tuple(value.shape) != shape:
        raise UsageError(
            f"{name} has shape {tuple(value.shape)} in the files and {shape} in the model",
            hint="Build the model from the configuration that belongs to the files.",
        )
    for other, again in others:
        if not torch.equal(value, again()):
            raise UsageError(
                f"{name} and {other} are one parameter in the model and differ in the files",
                hint="Build the model without the tie (Transformers: tie_word_embeddings=False).",
            )
    return value


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _refuse(missing: Sequence[str], surplus: Sequence[str]) -> None:
    if missing or surplus:
        parts = [
            f"{len(names)} tensors {what}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
            for names, what in ((missing, "of the model are not in the files"), (surplus, "of the files fit nothing"))
            if names
        ]
        raise UsageError(
            "; ".join(parts),
            hint="Build the model that belongs to the files, or say so: new=[...] for what shall begin from the seed, "
            "unused=[...] for what is to be left out; * stands for anything.",
        )
