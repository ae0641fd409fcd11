"""Modules that take the place of a model's own for as long as it is trained, and compute otherwise.

A stand-in is of a subclass of its module's own class, and shares its parameters, hooks and attributes; the user's
object is not touched.
"""

from typing import Any

from torch import nn


class StandIns:
    """Those in one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._paths: dict[nn.Module, list[str]] = {}
        self._replaced: list[tuple[str, nn.Module]] = []

    def swap(self, module: nn.Module, behaviour: type[nn.Module], **attributes: Any) -> None:
        """Wherever `module` is registered there is one now that has what `behaviour` defines, and `attributes`."""
        kind = type(type(module).__name__, (behaviour, type(module)), {"__module__": type(module).__module__})
        new: nn.Module = object.__new__(kind)
        new.__dict__.update(module.__dict__)
        new.__dict__.update(attributes)
        if module not in self._paths:  # The first that is swapped, or one that others have put there since.
            self._find_paths()
        self._paths[new] = self._paths.pop(module)
        for path in self._paths[new]:
            self._replaced.append((path, module))
            self._put(path, new)

    def close(self) -> None:
        """Modules are the user's own again."""
        while self._replaced:
            self._put(*self._replaced.pop())
        self._paths.clear()

    def _find_paths(self) -> None:
        self._paths.clear()
        for path, module in self._model.named_modules(remove_duplicate=False):
            self._paths.setdefault(module, []).append(path)

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self._model.get_submodule(parent), name, module)
