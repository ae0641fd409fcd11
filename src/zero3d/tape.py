"""What was done to tensors without data, kept so that it can be done again on tensors with data.

A tensor on the meta device has a shape and no values. A `Cell` is the history of one such storage: the value
it started from, if it had one, and every `Entry` (an operation with its arguments) that wrote to it since. To
give one tensor its values, `entries_for` collects the entries that its cell depends on and `replay` runs them
in the order in which they were recorded. Random entries are seeded one by one from (seed, name, number), so
values do not depend on what else is replayed, or when.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero3d.mapped import fresh

CPU = torch.device("cpu")


@dataclass(eq=False)
class Cell:
    """The history of one storage of `num_bytes` bytes."""

    num_bytes: int
    label: str = ""
    """What messages call it: "Linear.weight"."""
    value: torch.UntypedStorage | None = None
    """The values it had before the first of `writes`; None if they were undefined."""
    foreign: bool = False
    """It existed before recording began: its first values are unknown."""
    read: bool = False
    """Another cell's entry has read it, so its past is still needed when its values are all replaced."""
    writes: list["Entry"] = field(default_factory=list)

    def forget(self) -> None:
        """The next write replaces every value: drop what no entry reads any more."""
        if not self.read:
            self.writes.clear()
            self.value = None
            self.foreign = False


@dataclass(frozen=True, eq=False)
class Ref:
    """A tensor as a view of a cell."""

    cell: Cell
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor, cell: Cell) -> "Ref":
        return Ref(cell, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    @property
    def is_whole(self) -> bool:
        """Whether it is every element of its cell, in order."""
        numel, strides = 1, []
        for size in reversed(self.size):
            strides.append(numel)
            numel *= size
        in_order = tuple(reversed(strides)) == self.stride and self.offset == 0
        return in_order and numel * self.dtype.itemsize == self.cell.num_bytes

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        view: Tensor = torch.empty(0, dtype=self.dtype, device=CPU)
        return view.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class Entry:
    """One operation: arguments without data are `Ref`s, all others are held as they were."""

    order: int
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    random: bool
    outputs: list[Ref | None] = field(default_factory=list)
    """Among the tensors it returned, in order, those that are new storages."""
    key: tuple[str, int] | None = None
    """(parameter, number) that a random entry is seeded from; see `name_entries`."""

    @property
    def leaves_undefined(self) -> bool:
        return str(getattr(self.func, "__name__", self.func)).startswith(("empty", "new_empty"))

    @property
    def refs(self) -> list[Ref]:
        return [leaf for leaf in leaves([self.args, self.kwargs]) if isinstance(leaf, Ref)]


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in nested lists, tuples and dicts, in order."""
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))
    else:
        yield tree


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        changed = [map_leaves(change, item) for item in tree]
        return changed if isinstance(tree, list) else tuple(changed)
    if isinstance(tree, dict):
        return {key: map_leaves(change, item) for key, item in tree.items()}
    return change(tree)


def entries_for(target: Cell) -> tuple[list[Entry], set[Cell]]:
    """All entries that decide the values of `target`, in order, and the cells that they read or write."""
    found: set[Entry] = set()
    seen_until: dict[Cell, float] = {}
    todo: list[tuple[Cell, float]] = [(target, float("inf"))]
    while todo:
        cell, before = todo.pop()
        if seen_until.get(cell, -1) >= before:
            continue
        seen_until[cell] = before
        for entry in cell.writes:
            if entry.order < before and entry not in found:
                found.add(entry)
                todo.extend((ref.cell, entry.order) for ref in entry.refs)
    return sorted(found, key=lambda entry: entry.order), set(seen_until)


def is_unknown(entries: Sequence[Entry], cells: set[Cell]) -> bool:
    """Whether the values that follow from `entries_for` some cell are not defined."""
    if any(cell.foreign for cell in cells):
        return True
    return all(entry.leaves_undefined for entry in entries) and all(cell.value is None for cell in cells)


def holds_data(entries: Sequence[Entry], cells: set[Cell]) -> bool:
    """Whether some values that decide follow from no recorded operation."""
    if any(cell.value is not None for cell in cells):
        return True
    return any(isinstance(leaf, Tensor) for entry in entries for leaf in leaves([entry.args, entry.kwargs]))


def name_entries(named: Sequence[tuple[str, Cell]]) -> None:
    """Decides what each random entry is seeded from.

    Entries that write a named cell are numbered within it. Those that write a nameless one (a scratch tensor,
    or a prototype that was copied) belong to the first named cell that depends on them, so copies of one
    tensor stay copies of it.
    """
    for name, cell in named:
        for number, entry in enumerate(entry for entry in cell.writes if entry.random):
            entry.key = entry.key or (name, number)
    for name, cell in named:
        nameless = [entry for entry in entries_for(cell)[0] if entry.random and entry.key is None]
        for number, entry in enumerate(nameless):
            entry.key = (f"{name}/scratch", number)


def seed_number(seed: int, name: str, number: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{number}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def replay(target: Ref, entries: Iterable[Entry], seed: int) -> Tensor:
    """The values of `target`, on the CPU. Reseeds torch's CPU generator: the caller saves and restores it."""
    storages: dict[Cell, torch.UntypedStorage] = {}

    def storage_of(cell: Cell) -> torch.UntypedStorage:
        if cell not in storages:
            value: Any = cell.value  # the types of storages are incomplete
            if value is None:
                storages[cell] = fresh(cell.num_bytes, torch.uint8, CPU).untyped_storage()
            else:
                storages[cell] = value.cpu().clone() if cell.writes else value.cpu()
        return storages[cell]

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return leaf.on(storage_of(leaf.cell))
        if isinstance(leaf, torch.device):
            return CPU
        if isinstance(leaf, Tensor):
            return leaf.cpu()
        return None if isinstance(leaf, torch.Generator) else leaf

    for entry in entries:
        if entry.random:
            assert entry.key is not None
            torch.default_generator.manual_seed(seed_number(seed, *entry.key))
        result = entry.func(*map_leaves(real, entry.args), **map_leaves(real, entry.kwargs))
        outputs = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        for output, ref in zip(outputs, entry.outputs):
            if ref is not None:
                if entry.leaves_undefined:
                    output.zero_()
                storages[ref.cell] = _as_recorded(output, ref)
    return target.on(storage_of(target.cell))


def _as_recorded(output: Tensor, ref: Ref) -> torch.UntypedStorage:
    """The storage of `output`, laid out as later entries expect it: devices may choose other strides."""
    layout = tuple(output.size()), output.stride(), output.storage_offset()
    enough = output.untyped_storage().nbytes() >= ref.cell.num_bytes
    if layout == (ref.size, ref.stride, ref.offset) and enough:
        return output.untyped_storage()
    storage = fresh(ref.cell.num_bytes, torch.uint8, CPU).untyped_storage()
    ref.on(storage).copy_(output)
    return storage
