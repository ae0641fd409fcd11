"""Which dims of which parameters a style cuts."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zero3d.errors import ConfigError
from zero3d.slicing import Slicing, UnevenError, even, fused, grouped, heads, padded
from zero3d.tensor.plan import Chosen, Style

COLUMNS = ("colwise", "kv", "qkv", "gate_up", "colwise_gather_output", "vocab")
ROWS = ("rowwise", "rowwise_split_input")
HEAD_WIDTHS = ("head_dim", "head_width", "head_size")
"""What modules call the width of a head: their projections are cut in whole heads."""
MOST_RANKS = 512
"""That are tried where a number of ranks does not fit."""


def slicings(model: nn.Module, chosen: Sequence[Chosen], ranks: int) -> dict[str, Slicing]:
    """Parameter, by its first name -> how it is cut. Raises `ConfigError` for what cannot be cut as the plan says, with
    numbers of ranks that would do."""
    found: dict[str, tuple[str, Slicing]] = {}
    names = first_names(model)
    for one in chosen:
        try:
            cut = _cut(model, one, ranks)
        except UnevenError as error:
            works = " or ".join(map(str, _fitting(model, chosen)))
            raise ConfigError(
                f"parallel.tp = {ranks}: {one.path} cannot be cut: {error}",
                hint=f"Set parallel.tp to {works}." if works else "Give it another style in [parallel.plan].",
            ) from None
        for parameter, slicing in cut:
            name = names[parameter]
            path, before = found.setdefault(name, (one.path, slicing))
            if (before.dim, before.ranges) != (slicing.dim, slicing.ranges):
                raise ConfigError(
                    f"parallel.plan cuts {name} in two ways, as {path} and as {one.path} use it",
                    hint='Modules that share a weight need styles that cut it alike, such as "vocab" for both.',
                )
    return {name: slicing for name, (_, slicing) in found.items()}


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """None where `path` is a parameter's."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def first_names(model: nn.Module) -> dict[Any, str]:
    """Of its parameters, each of which may have several names, by the parameter."""
    return {parameter: name for name, parameter in model.named_parameters()}


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight is [in, out], as that of Transformers' Conv1D."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def _cut(model: nn.Module, one: Chosen, ranks: int) -> list[tuple[nn.Parameter, Slicing]]:
    style = one.style(*COLUMNS, *ROWS)
    if style is None:
        return []
    module = module_at(model, one.path)
    if module is None:
        parameter = model.get_parameter(one.path)
        if parameter.dim() < 3 or style.name not in ("colwise", "gate_up", *ROWS):
            raise _misfit(one, style, "a parameter", "modules, or for weights of experts with 3 dims")
        return [(parameter, _of_experts(tuple(parameter.shape), style, ranks))]
    if style.name == "vocab" and isinstance(module, nn.Embedding):
        cut = {"weight": padded(module.num_embeddings, ranks, 0)}
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise _misfit(one, style, "an embedding with max_norm, scale_grad_by_freq or sparse", "plain ones")
    elif type(module).forward is nn.Linear.forward or is_transposed(module):
        cut = _of_linear(module, style, model.get_submodule(one.parent), ranks)
    else:
        fits = "nn.Linear and nn.Embedding" if style.name == "vocab" else "nn.Linear"
        raise _misfit(one, style, type(module).__name__, fits)
    return [(getattr(module, attribute), slicing) for attribute, slicing in cut.items()]


def _misfit(one: Chosen, style: Style, kind: str, fits: str) -> ConfigError:
    return ConfigError(
        f'parallel.plan: "{one.path}" is {kind}, and {style} is for {fits}',
        hint=f'Set "{one.path}" = "replicate" in [parallel.plan]: it stays whole.',
    )


def _fitting(model: nn.Module, chosen: Sequence[Chosen]) -> list[int]:
    """The smallest numbers of ranks that divide all that is cut."""

    def fits(ranks: int) -> bool:
        try:
            for one in chosen:
                _cut(model, one, ranks)
        except UnevenError:
            return False
        return True

    found = (ranks for ranks in range(1, MOST_RANKS + 1) if fits(ranks))
    return [ranks for ranks, _ in zip(found, range(8))]


def _of_linear(module: nn.Module, style: Style, parent: nn.Module, ranks: int) -> dict[str, Slicing]:
    shape: tuple[int, ...] = tuple(module.get_parameter("weight").shape)
    out, into = (1, 0) if is_transposed(module) else (0, 1)
    if style.name in ROWS:
        return {"weight": even(shape[into], ranks, into, _unit(style, parent, shape[into]))}
    slicing = _of_columns(style, parent, ranks, shape[out])
    has_bias = getattr(module, "bias", None) is not None
    return {"weight": slicing(out)} | ({"bias": slicing(0)} if has_bias else {})


def _of_experts(shape: tuple[int, ...], style: Style, ranks: int) -> Slicing:
    """[..., out, in]"""
    dim = len(shape) - (1 if style.name in ROWS else 2)
    return _halves(shape[dim], ranks, dim) if style.name == "gate_up" else even(shape[dim], ranks, dim)


def _of_columns(style: Style, parent: nn.Module, ranks: int, extent: int) -> Callable[[int], Slicing]:
    """dim -> its slicing."""
    if style.name in ("vocab", "colwise_gather_output"):
        return lambda dim: padded(extent, ranks, dim)
    if style.name == "gate_up":
        return lambda dim: _halves(extent, ranks, dim)
    if style.name == "qkv":
        number, of_kv = style.numbers
        width, rest = divmod(extent, number + 2 * of_kv)
        if rest:
            raise UnevenError(f"{extent} rows are not those of {number} heads and 2 x {of_kv} KV heads")
        return lambda dim: grouped(number, of_kv, width, ranks, dim)
    unit = _unit(style, parent, extent)
    if style.name == "kv":
        return lambda dim: heads(extent, ranks, dim, unit)
    return lambda dim: even(extent, ranks, dim, unit)


def _halves(extent: int, ranks: int, dim: int) -> Slicing:
    if extent % 2:
        raise UnevenError(f"{extent} rows are not those of two projections")
    return fused((extent // 2, extent // 2), ranks, dim)


def _unit(style: Style, parent: nn.Module, extent: int) -> int:
    if style.numbers:
        return style.numbers[0]
    widths: list[Any] = [getattr(parent, name, None) for name in HEAD_WIDTHS]
    return next((width for width in widths if isinstance(width, int) and width > 0 and extent % width == 0), 1)
