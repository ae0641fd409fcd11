"""Whole tensors by the user's own names, read and written, whatever a rank holds of them.

A `part` is an index as torch takes it, such as `slice(2, 5)` or `(slice(None), 0)`, of the whole tensor; None is all of
it. Of a part made of numbers and slices only the range from its first to its last element moves. Everything here is
collective. What is written is rank 0's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero3d.contracts import Axis, ModelSource
from zero3d.errors import UsageError
from zero3d.params import ParamInfo
from zero3d.zero.replica import ZeroReplica

Index = Any
"""What stands between the brackets of `tensor[...]`."""


@dataclass(frozen=True)
class Choice:
    """Elements `span` of a flattened tensor; `within` gives the chosen ones of these."""

    span: slice
    shape: tuple[int, ...]
    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor], object]


class Cut(Protocol):
    """How parameters are cut over other ranks than those of `replica`."""

    def join(self, info: ParamInfo, flat: Tensor) -> Tensor:
        """This rank's part, flat -> the whole parameter, flat. Collective."""
        ...

    def cut(self, info: ParamInfo, flat: Tensor) -> Tensor: ...

    def whole(self, model: nn.Module, infos: Iterable[ParamInfo]) -> AbstractContextManager[None]:
        """The model is plain inside, if what this rank has of its parameters is there. Entering is collective."""
        ...


class Places(Protocol):
    """Which parameters this rank has nothing of."""

    def has(self, name: str) -> bool: ...

    def share(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """What `read` gives where the parameter is, on all ranks, flat. Collective."""
        ...

    def together(self, infos: Sequence[ParamInfo]) -> AbstractContextManager[None]:
        """All parameters are there inside. Entering is collective."""
        ...


class Uncut:
    """`Cut` and `Places` of parameters that every rank has whole, but for what `replica` shards."""

    def join(self, info: ParamInfo, flat: Tensor) -> Tensor:
        return flat

    def cut(self, info: ParamInfo, flat: Tensor) -> Tensor:
        return flat

    def whole(self, model: nn.Module, infos: Iterable[ParamInfo]) -> AbstractContextManager[None]:
        return nullcontext()

    def has(self, name: str) -> bool:
        return True

    def share(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        return read()

    def together(self, infos: Sequence[ParamInfo]) -> AbstractContextManager[None]:
        return nullcontext()


class Access:
    """Reads and writes the weights, gradients and buffers of `model`: `replica` holds what this rank has of its
    parameters by `cut`.

    axes: over which, one after the other, rank 0 reaches all ranks; written: called, on every rank, after master
    weights were written to
    """

    def __init__(
        self,
        model: nn.Module,
        infos: Sequence[ParamInfo],
        replica: ZeroReplica,
        axes: Sequence[Axis],
        cut: Cut,
        places: Places,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._infos = infos
        self._replica = replica
        self._axes = axes
        self._cut = cut
        self._places = places
        self._device = replica.device
        self._written = written
        self._refusal = model.register_load_state_dict_pre_hook(_refuse_direct_loading)

    def close(self, *, in_parts: bool = False) -> None:
        """The model may be written to directly again, unless it stays `in_parts`: then it may not be used at all."""
        if in_parts:
            self._model.register_forward_pre_hook(_refuse_parts)
        else:
            self._refusal.remove()

    def info(self, name: str) -> ParamInfo:
        """Of the parameter that is called `name`, a tie's other names too."""
        for info in self._infos:
            if name in (info.name, *info.ties):
                return info
        raise UsageError(f"the model has no parameter {name}", hint="Names are those of model.named_parameters().")

    def weight_of(self, name: str, part: Index = None) -> Tensor:
        """Master weights, fp32, of a trained parameter; of a frozen one what it is."""
        info = self.info(name)
        choice = _choose(info, part)
        return _copy(choice.read(self._elements(self._replica.weight_of, info, choice.span)))

    def gradient_of(self, name: str, part: Index = None) -> Tensor:
        """Sums over ranks and micro-batches, fp32, not yet divided by the number of counted targets."""
        info = self.info(name)
        if not info.trainable:
            raise UsageError(
                f"parameter {name} is frozen and has no gradient",
                hint="Ask for one that is trained, or set requires_grad = True before the engine is made.",
            )
        choice = _choose(info, part)
        return _copy(choice.read(self._elements(self._replica.gradient_of, info, choice.span)))

    @torch.no_grad()
    def set_weight(self, name: str, value: Tensor, part: Index = None) -> None:
        """`value`, or that part of it, becomes the master weight and what the model computes with."""
        self._set(name, value, part)
        self._written()

    def _set(self, name: str, value: Tensor, part: Index) -> None:
        info = self.info(name)
        choice = _choose(info, part)
        value = torch.as_tensor(value)
        self._all_agree(
            tuple(value.shape) == choice.shape,
            f"{name}{'' if part is None else ', in that part,'} has shape {list(choice.shape)}, "
            f"the value {list(value.shape)} (or another rank's differs)",
            "Give a value of exactly that shape on every rank.",
        )
        if part is None:
            dtype = torch.float32 if info.trainable else info.dtype
            flat = value.to(self._device, dtype, copy=True).contiguous().view(-1)
        else:
            flat = self._elements(self._replica.weight_of, info, choice.span)
            choice.write(flat, value.to(flat))
        self._write(info, choice.span, self._rank_0s(flat, name))

    def _elements(self, read: Callable[[ParamInfo, slice], Tensor], info: ParamInfo, span: slice) -> Tensor:
        """Elements `span` of a flattened whole parameter. Of one that is cut all of it moves."""

        def here() -> Tensor:
            if info.slicing is None:
                return read(info, span)
            return self._cut.join(info, read(info.local, slice(0, info.local.numel)))[span]

        return self._places.share(info.name, here)

    def _write(self, info: ParamInfo, span: slice, values: Tensor) -> None:
        if info.slicing is not None:
            whole = self._elements(self._replica.weight_of, info, slice(0, info.numel))
            whole[span] = values
            info, span, values = info.local, slice(0, info.local.numel), self._cut.cut(info, whole)
        if self._places.has(info.name):
            self._replica.write(info, span, values)

    def state(self) -> dict[str, Tensor]:
        """Whole tensors under the user's own names, in the dtypes that the model was made with."""
        found = dict(self._replica.whole([info.local for info in self._here()]))
        whole: dict[str, Tensor] = {}
        for info in self._infos:
            part = found.pop(info.name, torch.empty(0, device=self._device)).view(-1)
            join = partial(self._cut.join, info, part)
            tensor = self._places.share(info.name, join).view(info.shape).to(info.dtype)
            whole.update((name, tensor) for name in (info.name, *info.ties))
        return {
            name: whole[name] if name in whole else self._rank_0s(_copy(tensor), name)
            for name, tensor in self._names().items()
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], *, strict: bool) -> tuple[list[str], list[str]]:
        """Writes all tensors of `state` that the model has. -> names that it lacks, names that the model lacks."""
        known = self._names()
        missing = [name for name in known if name not in state]
        unexpected = [name for name in state if name not in known]
        # What the model has of a parameter is a part again.
        shapes = {name: info.shape for info in self._infos for name in (info.name, *info.ties)}
        wrong = [
            name
            for name, tensor in known.items()
            if name in state and tuple(state[name].shape) != shapes.get(name, tuple(tensor.shape))
        ]
        told = {"has not": missing if strict else [], "has besides": unexpected if strict else []}
        told["has in another shape"] = wrong
        self._all_agree(
            not any(told.values()),
            "the state does not fit the model: it "
            + "; ".join(f"{what} {', '.join(names)}" for what, names in told.items() if names),
            "strict=False loads what fits; shapes must always be the model's.",
        )
        names = {name: info for info in self._infos for name in (info.name, *info.ties)}
        # Of a tie the first name counts: it is written last.
        for name in sorted(set(known) & set(state), key=lambda name: name in names and names[name].name == name):
            if name in names:
                self._set(name, state[name], None)
            else:
                known[name].copy_(self._rank_0s(state[name].to(known[name], copy=True).contiguous(), name))
        self._written()
        return missing, unexpected

    @contextmanager
    def gathered(self, *, write: bool) -> Iterator[None]:
        """All parameters are whole and plain inside. `write`: what is written to them is kept, else it is an error."""
        with self._whole():
            parameters = [self._model.get_parameter(info.name) for info in self._infos]
            before = [parameter._version for parameter in parameters]
            yield
            changed = [int(parameter._version != version) for parameter, version in zip(parameters, before)]
            if write:
                self._keep(parameters, changed)
            elif any(changed):
                raise UsageError(
                    f"parameter {self._infos[changed.index(1)].name} was written to inside engine.gathered()",
                    hint="That reaches neither master weights nor other ranks. Use engine.gathered(write=True), or "
                    "engine.set_weight(name, value).",
                )

    @torch.no_grad()
    def _keep(self, parameters: Sequence[nn.Parameter], changed: Sequence[int]) -> None:
        flags = torch.tensor(changed, dtype=torch.int64, device=self._device)
        for axis in self._axes:
            axis.all_reduce(flags, "parameters that were written to").wait()
        for info, parameter, flag in zip(self._infos, parameters, flags.tolist()):
            if flag and info.numel:
                values = self._rank_0s(_copy(parameter).view(-1), info.name)
                self._write(info, slice(0, info.numel), values)
        if bool(flags.any()):
            self._written()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        here = self._here()
        with self._replica.gathered(), self._cut.whole(self._model, here), self._places.together(self._infos):
            yield

    def _here(self) -> list[ParamInfo]:
        return [info for info in self._infos if self._places.has(info.name)]

    def _names(self) -> dict[str, Tensor]:
        with self._whole():
            return dict(self._model.state_dict(keep_vars=True))

    def _rank_0s(self, tensor: Tensor, name: str) -> Tensor:
        """In place."""
        if tensor.numel():
            for axis in self._axes:
                axis.broadcast(tensor.view(-1).view(torch.uint8), 0, f"value of {name}").wait()
        return tensor

    def _all_agree(self, good: bool, message: str, hint: str) -> None:
        """Raises on every rank where something is not `good` on one."""
        bad = torch.tensor([0 if good else 1], dtype=torch.int64, device=self._device)
        for axis in self._axes:
            axis.all_reduce(bad, "whether what is written fits").wait()
        if int(bad):
            raise UsageError(message, hint=hint)


def refuse_sharded(model: ModelSource) -> None:
    """Raises `UsageError` for a model whose parameters somebody shards already."""
    if isinstance(model, nn.Module) and any(
        getattr(hook, "hook", hook) is _refuse_direct_loading for hook in model._load_state_dict_pre_hooks.values()
    ):
        raise UsageError(
            "the model is sharded already",
            hint="Close the engine, or what zero3d.shard gave, that has it; or pass another model.",
        )


def _choose(info: ParamInfo, part: Index) -> Choice:
    members = part if isinstance(part, tuple) else (part,)
    basic = all(one is None or one is ... or isinstance(one, int | slice) for one in members)
    basic = basic and not any(isinstance(one, bool) for one in members)
    if part is None:
        return Choice(slice(0, info.numel), info.shape, lambda flat: flat.view(info.shape), _never)
    try:
        shape = tuple(torch.empty(1).expand(info.shape)[part].shape)
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{part!r} is no part of {info.name}, which has shape {list(info.shape)}: {error}",
            hint="A part is an index of the whole tensor, such as slice(2, 5) or (slice(None), 0).",
        ) from error
    if not basic:

        def write_whole(flat: Tensor, value: Tensor) -> None:
            flat.view(info.shape)[part] = value

        return Choice(slice(0, info.numel), shape, lambda flat: flat.view(info.shape)[part], write_whole)
    chosen = torch.empty(info.shape, device="meta")[part]
    start, strides = chosen.storage_offset(), chosen.stride()
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides))
    span = slice(start, start + last + 1) if chosen.numel() else slice(0, 0)

    def within(flat: Tensor) -> Tensor:
        return flat.as_strided(shape, strides)

    return Choice(span, shape, within, lambda flat, value: within(flat).copy_(value))


def _refuse_direct_loading(*_: object) -> None:
    raise UsageError(
        "model.load_state_dict would reach neither the master weights nor the shards of other ranks",
        hint="Use engine.load_state_dict(state), on every rank.",
    )


def _refuse_parts(*_: object) -> None:
    raise UsageError(
        "the engine that had this model is closed, and of a model that is cut over ranks each has a part",
        hint="Take engine.full_state_dict() before, or after, and load it into a model of your own.",
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _never(flat: Tensor, value: Tensor) -> None:
    raise AssertionError("a whole tensor is written without reading it")
