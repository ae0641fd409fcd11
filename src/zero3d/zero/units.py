"""Which modules are gathered, released and reduced as one: the blocks, and the modules outside them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from zero3d.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Unit:
    """A module whose parameters `names` it is the first to own; `needs` are all that its forward may use."""

    name: str
    module: nn.Module
    is_block: bool
    names: tuple[str, ...]
    needs: tuple[str, ...]


def find_blocks(model: nn.Module, path: str | None = None) -> tuple[str, Sequence[nn.Module]]:
    """The path and the modules of the list of repeated blocks; ("", ()) where a model has none.

    Without `path`: of all nn.ModuleList and nn.Sequential whose members have one class and own parameters,
    the one with the most parameters.
    """
    if path is not None:
        try:
            chosen = model.get_submodule(path)
        except AttributeError:
            found, _ = find_blocks(model)
            raise ConfigError(
                f'model.blocks = "{path}": the model has no such module',
                hint=f'A list of blocks was found at "{found}".' if found else "Leave the key out.",
            ) from None
        return path, tuple(chosen.children())
    best: tuple[int, str, Sequence[nn.Module]] = (0, "", ())
    for name, module in model.named_modules():
        members = tuple(module.children())
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len({type(m) for m in members}) != 1:
            continue
        if len(members) < 2 or not all(any(True for _ in member.parameters()) for member in members):
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > best[0]:
            best = (size, name, members)
    return best[1], best[2]


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
            units.append(Unit(name, module, is_block, own, tuple(names[id(parameter)] for parameter in mine)))
    return units


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
