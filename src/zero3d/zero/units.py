"""Which modules are gathered, released and reduced as one: the blocks, and the modules outside them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from zero3d.errors import ConfigError
from zero3d.params import ParamInfo


@dataclass(frozen=True, eq=False)
class Unit:
    """A module whose parameters `names` it is the first to own; `needs` are all that its forward may use.

    `kept`: those of `names` that are not gathered and released with the module: all, where it is no block.
    `alone`: its parameters share a bucket with no others.
    """

    name: str
    module: nn.Module
    is_block: bool
    names: tuple[str, ...]
    needs: tuple[str, ...]
    kept: tuple[str, ...]
    alone: bool = False


OTHER_LISTS = 4
"""A list beside the largest one is of blocks too from a quarter of its size: a decoder's beside an encoder's."""


def find_blocks(model: nn.Module, path: str | None = None) -> tuple[str, Sequence[nn.Module]]:
    """The path and the modules of the list of repeated blocks; ("", ()) where a model has none.

    A model may have several, such as an encoder's and a decoder's: their paths are joined by ", ", and the blocks are
    in registration order. Without `path`: of all nn.ModuleList and nn.Sequential whose members have one class and own
    parameters, the one with the most parameters; and those not inside it that are nearly as large and whose members
    are made of modules themselves. (A list of single layers, such as heads, may be used in part: no blocks.)
    """
    if path is not None:
        paths = [one.strip() for one in path.split(",")]
        try:
            chosen = [model.get_submodule(one) for one in paths]
        except AttributeError as error:
            found, _ = find_blocks(model)
            raise ConfigError(
                f'model.blocks = "{path}": the model has no such module ({error})',
                hint=f'A list of blocks was found at "{found}".' if found else "Leave the key out.",
            ) from None
        return ", ".join(paths), tuple(block for one in chosen for block in one.children())
    lists = {name: module for name, module in model.named_modules() if _repeats(module)}
    sizes = {name: sum(parameter.numel() for parameter in module.parameters()) for name, module in lists.items()}
    taken: list[str] = []
    for name in sorted(lists, key=lambda name: sizes[name], reverse=True):
        if not any(_inside(name, other) or _inside(other, name) for other in taken) and (
            not taken or (sizes[name] * OTHER_LISTS >= sizes[taken[0]] and _has_parts(lists[name]))
        ):
            taken.append(name)
    paths = [name for name in lists if name in taken]
    return ", ".join(paths), tuple(block for name in paths for block in lists[name].children())


def _repeats(module: nn.Module) -> bool:
    members = tuple(module.children())
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(members) < 2:
        return False
    return len({type(one) for one in members}) == 1 and all(any(True for _ in one.parameters()) for one in members)


def _has_parts(module: nn.Module) -> bool:
    return all(any(True for _ in member.children()) for member in module.children())


def _inside(name: str, other: str) -> bool:
    return not other or name.startswith(f"{other}.")


def split_units(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Unit]:
    """The units of `model` in registration order; every parameter belongs to exactly one of them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken: set[int] = set()
    units = []
    for name, module, is_block, whole in _walk("", model, {id(block) for block in blocks}):
        mine = [parameter for parameter in module.parameters(recurse=whole) if parameter.numel()]
        fresh = [parameter for parameter in mine if id(parameter) not in taken]
        taken.update(id(parameter) for parameter in fresh)
        if mine:
            own = tuple(names[id(parameter)] for parameter in fresh)
            needs = tuple(names[id(parameter)] for parameter in mine)
            units.append(Unit(name, module, is_block, own, needs, () if is_block else own))
    return units


def of_rank(units: Sequence[Unit], has: Callable[[str], bool], shared: Collection[str]) -> list[Unit]:
    """Those of `units` whose parameters this rank `has`; each of those that are `shared` with others is alone."""
    taken: set[str] = set()
    found: list[Unit] = []
    for unit in units:
        if not all(has(name) for name in unit.needs):
            continue
        fresh = [name for name in unit.needs if name not in taken]
        taken.update(fresh)
        for name in fresh:
            if name in shared:
                found.append(Unit(f"{unit.name} ({name})", unit.module, False, (name,), (name,), (name,), alone=True))
        names = tuple(name for name in fresh if name not in shared)
        found.append(replace(unit, names=names, kept=() if unit.is_block else names))
    return found


def keep_gathered(units: Sequence[Unit], infos: Iterable[ParamInfo], patterns: Sequence[str]) -> list[Unit]:
    """`units`, of which the parameters that match `patterns` (zero.keep_gathered) are kept. A tied parameter matches
    by any of its names. Raises `ConfigError` for a pattern that matches none."""
    names = {one: info.name for info in infos for one in (info.name, *info.ties)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names)[:3]
            raise ConfigError(
                f'zero.keep_gathered: no parameter matches "{pattern}"',
                hint=f"Names are those of model.named_parameters(), such as {', '.join(near)}; * stands for any text.",
            )
    kept = {first for name, first in names.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return [
        replace(unit, kept=tuple(name for name in unit.names if name in kept or name in unit.kept)) for unit in units
    ]


def _walk(name: str, module: nn.Module, blocks: set[int]) -> Iterator[tuple[str, nn.Module, bool, bool]]:
    """(name, module, is a block, with its submodules) of each unit below `module`."""
    if id(module) in blocks:
        yield name, module, True, True
        return
    holds_blocks = any(id(inner) in blocks for inner in module.modules())
    if name and not holds_blocks:
        yield name, module, False, True
        return
    yield name, module, False, False
    for key, child in module.named_children():
        yield from _walk(f"{name}.{key}" if name else key, child, blocks)
