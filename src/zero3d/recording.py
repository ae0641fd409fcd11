"""Builds a module whose parameters never hold data, and records what its constructor does to them.

While a `Recorder` is entered, every parameter becomes a meta tensor the moment a module registers it, and
each operation on a meta tensor is kept on the tape (`tape.py`) instead of being computed. Tensors that are no
parameters, such as buffers, stay real. So `nn.init` functions, `module.apply(init)`, copies of modules and
shared parameters mean what they always mean, and no more than one parameter's values exist at a time.

What cannot be recorded (asking for a value, using a parameter through a reference kept from before it was
registered) raises `UnrecordableError` and stays noted in `Recorder.failure`, even if the constructor catches
the error.
"""

import sys
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zero3d.tape import Cell, Entry, Ref, leaves, map_leaves

REPLACES_ALL = frozenset(("zero_", "fill_", "normal_", "uniform_", "copy_", "bernoulli_", "exponential_"))
"""Operations after which no earlier value is left."""
KEEPS_SHAPE = REPLACES_ALL | {"mul_", "add_", "sub_", "div_", "erfinv_", "clamp_", "clamp_min_", "clamp_max_"}
"""Operations on one tensor that need not be run on meta: torch would import its compiler for some of them."""
CREATES = frozenset(("empty", "empty_strided", "zeros", "ones", "full", "eye", "arange", "rand", "randn"))
"""Operations on no tensor that can as well be done later."""
MOVES_STORAGE = frozenset(("set_", "resize_", "resize_as_"))


# Both are without types in torch.
WeakStorage: Any = reductions.StorageWeakRef
on_registration: Any = register_module_parameter_registration_hook


class UnrecordableError(Exception):
    """What was done can only be done with values at hand."""


class Recorder:
    """Records between `__enter__` and `__exit__`; `cell_of` and `failure` are read afterwards."""

    def __init__(self) -> None:
        self.failure: str = ""
        """The first thing that could not be recorded."""
        self._cells: dict[int, tuple[torch.UntypedStorage, Cell]] = {}
        self._real: dict[int, tuple[Any, Cell]] = {}
        """Real storages whose every value can be made again: what a parameter may begin as."""
        self._spent: dict[int, tuple[Any, str]] = {}
        """Real storages of parameters that have become meta: their values no longer count."""
        self._twins: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
        self._num_entries = 0
        self._paused = False
        self._modes: list[Any] = [_Operations(self), _Questions(self)]

    def __enter__(self) -> "Recorder":
        self._hook = on_registration(self._register)
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)
        self._hook.remove()

    def cell_of(self, tensor: Tensor) -> Cell | None:
        """The history of a meta tensor; None for a real one or one that recording never met."""
        found = self._cells.get(_key(tensor))
        return found[1] if found else None

    def is_spent(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the real tensor that some parameter was before it was registered."""
        found = self._spent.get(_key(tensor))
        return found is not None and not found[0].expired()

    def fail(self, reason: str) -> UnrecordableError:
        self.failure = self.failure or reason
        return UnrecordableError(reason)

    # Registering -------------------------------------------------------------------------------------------

    def _register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        label = f"{type(module).__name__}.{name}"
        if parameter.device.type == "meta":
            if (cell := self.cell_of(parameter)) is not None:
                cell.label = cell.label or label
            return None
        twin = self._twins.get(id(parameter))
        if twin is not None and twin[0]() is parameter:
            return twin[1]
        if type(parameter) is not nn.Parameter:
            raise self.fail(f"{label} is a {type(parameter).__name__}")
        if self.is_spent(parameter):
            raise self.fail(f"{label} shares memory with another parameter")
        self._paused = True
        try:
            return self._without_data(parameter, label)
        finally:
            self._paused = False

    def _without_data(self, parameter: nn.Parameter, label: str) -> nn.Parameter:
        storage, key = parameter.untyped_storage(), _key(parameter)
        if key not in self._real:
            self._real[key] = WeakStorage(storage), Cell(storage.nbytes(), value=storage)
        weak, cell = self._real.pop(key)
        cell.label = label
        whole = torch.empty(storage.nbytes() // parameter.itemsize, dtype=parameter.dtype, device="meta")
        view = whole.as_strided(parameter.size(), parameter.stride(), parameter.storage_offset())
        twin = nn.Parameter(view, requires_grad=parameter.requires_grad)
        vars(twin).update(vars(parameter))
        self._cells[_key(twin)] = twin.untyped_storage(), cell
        self._spent[key] = weak, label
        self._twins[id(parameter)] = weakref.ref(parameter), twin
        return twin

    # Operations --------------------------------------------------------------------------------------------

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation and keeps what is needed to run it again."""
        if self._paused:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if self.is_spent(tensor):
                label = self._spent[_key(tensor)][1]
                raise self.fail(f"{label} was used by {func} as it was before the module registered it")
        if any(map(_is_meta, tensors)):
            return self._operate_on_meta(func, args, kwargs, tensors)
        result = func(*args, **kwargs)
        if any(_is_meta(leaf) for leaf in leaves(result)):
            self.keep(func, map_leaves(self.held, args), map_leaves(self.held, kwargs), [], result)
        else:
            self._follow(func, args, kwargs, tensors, result)
        return result

    def _operate_on_meta(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if not hasattr(func, "_schema"):
            raise self.fail(f"{func} does not say what it writes")
        # Arguments are noted first: an operation such as `t_()` changes their shape.
        held_args, held_kwargs = map_leaves(self.held, args), map_leaves(self.held, kwargs)
        written = [Ref.of(tensor, self._cell(tensor)) for tensor in _written(func, args, kwargs)]
        if len(tensors) == 1 and tensors[0] is args[0] and _name(func) in KEEPS_SHAPE:
            result = args[0]
        else:
            try:
                result = func(*args, **kwargs)
            except Exception as error:
                labels = [ref.cell.label for ref in leaves([held_args, held_kwargs]) if isinstance(ref, Ref)]
                label = next(filter(None, labels), "a tensor computed from a parameter")
                raise self.fail(f"{func} on {label} needs its values") from error
        self.keep(func, held_args, held_kwargs, written, result)
        return result

    def keep(self, func: Any, args: Any, kwargs: Any, written: list[Ref], result: Any) -> None:
        """Puts an operation on the tape, unless all it did was to make a view."""
        outputs: list[Ref | None] = []
        for leaf in leaves(result):
            if isinstance(leaf, Tensor):
                new = _is_meta(leaf) and self.cell_of(leaf) is None
                outputs.append(Ref.of(leaf, self._cell(leaf, foreign=False)) if new else None)
        if not written and not any(outputs):
            return
        if written and _name(func) in MOVES_STORAGE:
            raise self.fail(f"{func} on {written[0].cell.label or 'a parameter'} changes its storage")
        entry = self._entry(func, args, kwargs, outputs)
        used = [ref.cell for ref in entry.refs]
        for cell in used:
            if used.count(cell) > 1 or all(cell is not ref.cell for ref in written):
                cell.read = True
        for ref in written:
            if used.count(ref.cell) == 1 and ref.is_whole and _replaces_all(func):
                ref.cell.forget()
            ref.cell.writes.append(entry)
        for output in outputs:
            if output is not None:
                output.cell.writes.append(entry)

    def _follow(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], result: Any) -> None:
        """Keeps track of real tensors made of nothing but numbers, as most parameters are at first."""
        own_generator = any(isinstance(leaf, torch.Generator) for leaf in leaves([args, kwargs]))
        if not tensors:
            if isinstance(result, Tensor) and _name(func) in CREATES and not own_generator:
                cell = Cell(result.untyped_storage().nbytes())
                cell.writes.append(self._entry(func, args, kwargs, [Ref.of(result, cell)]))
                self._real[_key(result)] = WeakStorage(result.untyped_storage()), cell
            return
        keys = {_key(tensor) for tensor in tensors}
        written = _written(func, args, kwargs)
        if not written and all(_key(leaf) in keys for leaf in leaves(result) if isinstance(leaf, Tensor)):
            return
        found = self._real.get(_key(tensors[0]))
        if found is not None and len(tensors) == len(written) == 1 and not own_generator:
            ref = Ref.of(tensors[0], found[1])
            held_args = map_leaves(lambda leaf: ref if leaf is tensors[0] else leaf, args)
            held_kwargs = map_leaves(lambda leaf: ref if leaf is tensors[0] else leaf, kwargs)
            if ref.is_whole and _replaces_all(func):
                ref.cell.forget()
            ref.cell.writes.append(self._entry(func, held_args, held_kwargs, [None]))
            return
        # Something else depends on the values now, so they must stay those that it saw.
        for key in keys:
            self._real.pop(key, None)

    def _entry(self, func: Any, args: Any, kwargs: Any, outputs: list[Ref | None]) -> Entry:
        self._num_entries += 1
        return Entry(self._num_entries, func, args, kwargs, _is_random(func), outputs)

    def _cell(self, tensor: Tensor, *, foreign: bool = True) -> Cell:
        if (found := self.cell_of(tensor)) is not None:
            return found
        storage = tensor.untyped_storage()
        self._cells[_key(tensor)] = storage, Cell(storage.nbytes(), foreign=foreign)
        return self._cells[_key(tensor)][1]

    def held(self, leaf: Any) -> Any:
        """An argument as the tape keeps it."""
        if not isinstance(leaf, Tensor):
            return leaf
        if not _is_meta(leaf):
            return leaf.detach().clone()
        if leaf.is_conj() or leaf.is_neg():
            raise self.fail("a conjugate view of a parameter was used")
        return Ref.of(leaf, self._cell(leaf))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Shows the recorder every operation, below autograd."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would import its compiler to keep it out: a second and 70 MB a rank. Nothing compiles here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.operate(func, args, kwargs or {})


class _Questions(TorchFunctionMode):
    """Answers `tensor.is_meta`, which several functions of `nn.init` ask in order to do nothing.

    Such a call is kept whole and done when the values exist. To everybody else the parameter passes for real,
    so that no constructor takes another path than it takes without us.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func != torch.Tensor.is_meta.__get__ or not answer:  # type: ignore[attr-defined]
            return answer
        frame = sys._getframe(1)
        if frame.f_globals is not vars(nn.init):
            return False
        code = frame.f_code
        init = vars(nn.init).get(code.co_name)
        if getattr(init, "__code__", None) is not code:
            raise self._recorder.fail(f"torch.nn.init.{code.co_name} is not known")
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        held = {name: self._recorder.held(frame.f_locals[name]) for name in names}
        written = [value for value in held.values() if isinstance(value, Ref)]
        self._recorder.keep(init, (), held, written, None)
        return True


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"


def _name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func).__name__)


def _is_function_of_init(func: Any) -> bool:
    return getattr(func, "__module__", "") == nn.init.__name__


def _replaces_all(func: Any) -> bool:
    writes_out = getattr(func, "_overloadname", "").endswith("out")
    return _name(func) in REPLACES_ALL or writes_out or _is_function_of_init(func)


def _is_random(func: Any) -> bool:
    return _is_function_of_init(func) or torch.Tag.nondeterministic_seeded in func.tags


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to, as its schema tells."""
    found: list[Tensor] = []
    schema = getattr(func, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found.extend(leaf for leaf in leaves(value) if isinstance(leaf, Tensor))
    return found
