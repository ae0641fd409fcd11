"""Whether a checkpoint is this model's: which of its tensors become which of the model's, and what has no counterpart.

The same on every rank, as it looks at whole tensors alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from zero3d.checkpoint.manifest import Entry, Manifest, Number
from zero3d.checkpoint.read import DTYPES
from zero3d.checkpoint.state import Holdings
from zero3d.errors import UsageError
from zero3d.params import ParamInfo

MOST = 12
"""Names that an error lists."""
MAY_BE_ALLOWED = (
    " With allow_missing (train --resume --allow-missing) what it lacks stays as it is, optimizer state begins anew, "
    "and what it has besides is left out."
)
NONE = Number(dtype=None, value=None)
"""State that is there, and None."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """By the model's names, entries of the checkpoint. missing: what the model has besides; unexpected: what the
    checkpoint has besides; unfit: what is there under a name and cannot be what the model has."""

    weights: Mapping[str, Entry]
    states: Mapping[str, Sequence[Entry]]
    numbers: Mapping[str, Mapping[str, Number]]
    buffers: Mapping[str, Entry]
    missing: Sequence[str]
    unexpected: Sequence[str]
    unfit: Sequence[str]

    def check(self, *, allow_missing: bool) -> None:
        """Raises `UsageError` unless everything has its counterpart; what is `unfit` is never allowed."""
        told = {"it lacks": self.missing, "it has besides": self.unexpected} if not allow_missing else {}
        told = {**told, "it has otherwise": self.unfit}
        problems = "; ".join(f"{what} {listed(names)}" for what, names in told.items() if names)
        if problems:
            raise UsageError(
                f"the checkpoint does not fit the model: {problems}",
                hint="Load it into the model that was saved, with the same optimizer."
                + ("" if self.unfit else MAY_BE_ALLOWED),
            )


def fit(manifest: Manifest, holdings: Holdings) -> Fit:
    """Names are compared with those of all ranks' parameters and of persistent buffers."""
    kinds: dict[str, list[Entry]] = {"weight": [], "state": [], "buffer": []}
    for entry in manifest.tensors:
        kinds[entry.kind].append(entry)
    weights = dict(_pairs(holdings.infos.values(), kinds["weight"]))
    names = {entry.name: name for name, entry in weights.items()}
    trained = {name for name, info in holdings.infos.items() if info.trainable and info.numel}
    states: dict[str, list[Entry]] = {}
    unexpected = [entry.name for entry in kinds["weight"] if entry.name not in names]
    for entry in kinds["state"]:
        if names.get(entry.name) in trained:
            states.setdefault(names[entry.name], []).append(entry)
        else:
            unexpected.append(entry.label)
    numbers = {names[name]: of for name, of in manifest.numbers.items() if name in names}
    lacking, left_out = _of_other_optimizers(states, numbers, holdings)
    saved = {entry.name: entry for entry in kinds["buffer"]}
    here = holdings.buffer_names
    unfit = [
        f"{name} {entry.dtype} {entry.shape} instead of {list(holdings.infos[name].shape)}"
        for name, entry in weights.items()
        if not _matches(entry, holdings.infos[name].shape, holdings.infos[name].dtype)
    ]
    unfit += [
        f"{name} {saved[name].dtype} {saved[name].shape} instead of {list(buffer.shape)}"
        for name, buffer in here.items()
        if name in saved and not _matches(saved[name], buffer.shape, buffer.dtype)
    ]
    return Fit(
        weights=weights,
        states=states,
        numbers=numbers,
        buffers={name: saved[name] for name in here if name in saved},
        missing=[*_missing(manifest, holdings, weights), *lacking, *(name for name in here if name not in saved)],
        unexpected=[*unexpected, *left_out, *(name for name in saved if name not in here)],
        unfit=unfit,
    )


def _of_other_optimizers(
    states: dict[str, list[Entry]], numbers: dict[str, dict[str, Number]], holdings: Holdings
) -> tuple[list[str], list[str]]:
    """State that another optimizer kept leaves `states` and `numbers`, all of a parameter's where it lacks some that
    this one needs. -> what is missing, and what is left out."""
    missing, left_out = [], []
    for name, wanted in holdings.optimizer.keys_of_state().items():
        of = states.get(name, [])
        there = {entry.key for entry in of} | {key for key, one in numbers.get(name, {}).items() if one != NONE}
        if not there or there == wanted:  # There is none before the first update.
            continue
        missing += [f"{key} of {name}" for key in sorted(wanted - there)]
        left_out += [f"{key} of {name}" for key in sorted(there - wanted)]
        kept = wanted if wanted <= there else ()
        states[name] = [entry for entry in of if entry.key in kept]
        numbers[name] = {key: one for key, one in numbers.get(name, {}).items() if key in kept}
    return missing, left_out


def _pairs(infos: Iterable[ParamInfo], entries: Sequence[Entry]) -> Iterator[tuple[str, Entry]]:
    """A tied parameter may have come under another of its names first."""
    by_name = {entry.name: entry for entry in entries}
    by_names = {frozenset([entry.name, *entry.ties]): entry for entry in entries}
    for info in infos:
        entry = by_name.get(info.name) or by_names.get(frozenset([info.name, *info.ties]))
        if entry is not None:
            yield info.name, entry


def _missing(manifest: Manifest, holdings: Holdings, weights: Mapping[str, Entry]) -> Iterator[str]:
    for name, info in holdings.infos.items():
        if name not in weights:
            if info.trainable or manifest.what != "trainable":
                yield name
        elif info.trainable and info.numel and manifest.what != "weights" and not weights[name].trainable:
            yield f"optimizer state of {name}, which was frozen"
    if manifest.what == "weights" and any(info.trainable for info in holdings.infos.values()):
        yield "all optimizer state, as weights alone were saved"


def _matches(entry: Entry, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Precision may be another, integers and bits are no real numbers."""
    saved = DTYPES[entry.dtype]
    return entry.shape == list(shape) and (saved == dtype or (saved.is_floating_point and dtype.is_floating_point))


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more
