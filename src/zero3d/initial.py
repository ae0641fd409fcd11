"""First weights that are the same for every layout, made without any rank holding the whole model.

a function that builds it   recorded: each parameter's values come from (seed, its name) alone
a module on meta            the same, from what the `reset_parameters()` of its modules do
a module with values        they are its own
a `Source`                  what it says, such as a file that every rank reads; the rest as of a function
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from zero3d.blueprint import Blueprint, Source, Values
from zero3d.computed import computed
from zero3d.errors import UsageError
from zero3d.recording import Recorder
from zero3d.reset import record_resets
from zero3d.tape import Cell, Ref, entries_for, holds_data, is_unknown, leaves, name_entries, replay


@computed
def draw(source: nn.Module | Callable[[], nn.Module], seed: int) -> Blueprint:
    """The blueprint of `source`.

    A function is run once, recorded, with about one parameter's values at a time in memory; random buffers
    follow `seed`. Parameters that get values of the function's own making, such as a loaded file or
    `nn.Parameter(torch.randn(n) * 2)`, are `given`. If something it does needs a parameter's values, or the
    record leaves a parameter without any, the whole model is built in memory from `seed` and
    `Blueprint.notice` says why.

    Two things differ from just running the function: a `torch.Generator` handed to a random operation on a
    parameter is not used (values would depend on the order of construction), and values are made on the CPU
    whatever device the function names.

    To be called outside of a FakeTensorMode: the blueprint needs little memory for a model of any size.
    Raises `UsageError` for a meta parameter or buffer that nothing fills, and what the function raises.
    """
    if isinstance(source, nn.Module):
        return _blueprint(source, {}, seed, "")
    if isinstance(source, Source):
        return source.fill(draw(source.build, seed))
    if not callable(source):
        raise UsageError(
            f"the model is a {type(source).__name__}; it must be an nn.Module or a function building one",
            hint="Pass the module itself, or a function without arguments that returns it.",
        )
    recorder = Recorder()
    try:
        with _Seeded(seed), recorder:
            model = source()
        problem = _not_recorded(model, recorder) if isinstance(model, nn.Module) else ""
    except Exception as error:
        # If the error is the function's own, it comes again when the function runs without the recorder.
        problem = f"{type(error).__name__}: {error}"
    problem = recorder.failure or problem
    if problem:
        with _Seeded(seed):
            model = source()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the function that builds the model returned {type(model).__name__}, no nn.Module",
            hint="Return the module from it.",
        )
    if problem:
        return _blueprint(model, {}, seed, f"the whole model was built in memory on every rank: {problem}")
    cells = {name: cell for name, tensor in _tensors(model) if (cell := recorder.cell_of(tensor)) is not None}
    return _blueprint(model, cells, seed, "")


def _blueprint(model: nn.Module, cells: Mapping[str, Cell], seed: int, notice: str) -> Blueprint:
    """`cells`: the histories that are known, by the names of parameters and buffers."""
    for name, tensor in _tensors(model):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise UsageError(f"{name} has no shape yet", hint="run a batch through lazy modules before")
    missing = [name for name, t in _tensors(model) if t.device.type == "meta" and name not in cells]
    with _Seeded(seed):
        sources: dict[str, Cell | Tensor] = {**cells, **record_resets(model, missing)}
    name_entries([(name, source) for name, source in sources.items() if isinstance(source, Cell)])
    values: dict[str, Values] = {}
    given: set[str] = set()
    for name, parameter in model.named_parameters():
        source = sources.get(name, parameter)
        values[name], is_given = _values(parameter, source, seed)
        if is_given:
            given.add(name)
    with _Seeded(seed):
        for name, buffer in list(model.named_buffers()):
            if name in sources:
                _replace_buffer(model, buffer, _values(buffer, sources[name], seed)[0]())
    return Blueprint(model, values, frozenset(given), notice)


def _values(tensor: Tensor, source: Cell | Tensor, seed: int) -> tuple[Values, bool]:
    """How to make the values of `tensor`, and whether they are given."""
    if isinstance(source, Tensor):
        return source.detach, True
    target, (entries, cells) = Ref.of(tensor, source), entries_for(source)
    return lambda: replay(target, entries, seed), holds_data(entries, cells)


def _not_recorded(model: nn.Module, recorder: Recorder) -> str:
    """Why the record does not tell all values of the model; empty if it does."""
    for name, tensor in _tensors(model):
        cell = recorder.cell_of(tensor)
        if cell is not None and is_unknown(*entries_for(cell)):
            return f"nothing that could be recorded sets {name}"
        if recorder.is_spent(tensor):
            return f"{name} is the tensor that a parameter was made of"
    parameters = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
            loose = [tensor for tensor in tensors if id(tensor) not in parameters]
            if any(recorder.cell_of(tensor) or recorder.is_spent(tensor) for tensor in loose):
                where = f"{path}.{attribute}" if path else attribute
                return f"{where} is computed from a parameter and is neither a parameter nor a buffer"
    return ""


class _Seeded:
    """Torch's CPU generator starts from `seed` inside and is as before afterwards."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._before)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _replace_buffer(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Wherever it is registered."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is old:
                module._buffers[name] = new
