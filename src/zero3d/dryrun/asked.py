"""What `zero3d.rehearse` is asked for, checked before any work."""

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero3d.config import Config
from zero3d.errors import ConfigError, UsageError
from zero3d.trees import tensors_in

MOST_RANKS = 1_000_000
MOST_MICRO_BATCHES = 1_000_000


def check_asked(loss: Any, config: Any, batch: Any, world: Any, ranks: Any, micro_batches: Any) -> None:
    """Raises `UsageError`, or `ConfigError`, for the first argument that is not what `rehearse_model` takes."""
    check_number("world", world, MOST_RANKS, "ranks in all")
    check_number("micro_batches", micro_batches, MOST_MICRO_BATCHES, "micro-batches of a step")
    if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not all(map(_is_whole, ranks)):
        raise UsageError(f"ranks = {ranks!r} is no list of integers", hint="Give those to rehearse, such as ranks=[0].")
    if not callable(loss):
        raise UsageError(
            f"loss = {loss!r} cannot be called",
            hint="Give a function of (output, batch) that returns a mean, or (a sum, how many it is of).",
        )
    if config is not None and not isinstance(config, Config | Mapping | str | Path):
        raise ConfigError(
            f"config = {config!r} is no configuration",
            hint='Give a dict of sections, such as {"zero": {"level": 3}}, or the path of a TOML file.',
        )
    if not any(tensor.numel() for tensor in tensors_in(batch)):
        raise UsageError("the batch has no tensor with elements", hint="Give one micro-batch, as the model takes it.")


def check_number(name: str, value: Any, most: int, what: str) -> None:
    if not _is_whole(value) or not 1 <= value <= most:
        raise UsageError(f"{name} = {value!r} is no number of {what}", hint=f"Give an integer from 1 to {most:,}.")


def _is_whole(value: Any) -> bool:
    """As an index is: NumPy's integers are."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
