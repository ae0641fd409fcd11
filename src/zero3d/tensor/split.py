"""A model over tensor-parallel ranks: each gets its part of the parameters that a plan names, and the modules that use
them compute with parts.

`split` comes before weights are made, so that no rank makes more than one parameter's whole values at a time; `watch`
comes when parameters are what they stay.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zero3d import params
from zero3d.blueprint import Blueprint, Values
from zero3d.config import Parallel
from zero3d.contracts import Axis
from zero3d.errors import ConfigError
from zero3d.linears import Linears
from zero3d.params import ParamInfo
from zero3d.slicing import Slicing
from zero3d.tensor.modules import Streams
from zero3d.tensor.partial import Partial
from zero3d.tensor.plan import Chosen, choose
from zero3d.tensor.shapes import module_at, slicings
from zero3d.tensor.wiring import Wiring
from zero3d.unfit import refuse_compiled
from zero3d.zero.shard import Shard


class TensorParallel:
    """One model over `axis`: how its parts and whole tensors become each other, and that modules compute with parts.

    `sequence`: what is not cut runs on parts of the sequence.
    """

    def __init__(self, axis: Axis, streams: Streams, *, sequence: bool) -> None:
        self.axis = axis
        self.streams = streams
        self.sequence = sequence and axis.size > 1
        self.active = axis.size > 1
        self.slicings: dict[str, Slicing] = {}
        self.chosen: Sequence[Chosen] = ()
        self.attributes: list[tuple[nn.Module, str, Any, Any]] = []
        self._cut_parameters: Sequence[tuple[nn.Parameter, ParamInfo]] = ()
        self._wiring: Wiring | None = None

    def infos(self, model: nn.Module) -> list[ParamInfo]:
        """Of the whole parameters."""
        return [
            replace(info, shape=slicing.whole_shape(info.shape), slicing=slicing) if slicing else info
            for info in params.collect(model)
            for slicing in [self.slicings.get(info.name)]
        ]

    def join(self, info: ParamInfo, flat: Tensor) -> Tensor:
        """This rank's part of a parameter, or of what its elements have, flat -> the whole, flat. Collective."""
        slicing = info.slicing
        if slicing is None:
            return flat
        every = flat.new_empty(self.axis.size, *info.local.shape)
        self.axis.all_gather(every.view(-1), flat.contiguous().view(-1), f"whole {info.name}").wait()
        whole = flat.new_empty(info.shape)
        for part, ranges in zip(every, slicing.ranges):
            at = 0
            for start, stop in ranges:
                whole.narrow(slicing.dim, start, stop - start).copy_(part.narrow(slicing.dim, at, stop - start))
                at += stop - start
        return whole.view(-1)

    def cut(self, info: ParamInfo, flat: Tensor) -> Tensor:
        """The inverse of `join`. Not collective."""
        slicing = info.slicing
        return flat if slicing is None else _cut(flat.view(info.shape), slicing, self.axis.index).reshape(-1)

    def counts(self, name: str) -> bool:
        """Whether this rank's part of a parameter counts where the parts of all ranks are added up."""
        slicing = self.slicings.get(name)
        return self.axis.index == 0 if slicing is None else slicing.counts(self.axis.index)

    def refuse_whole(self, names: Iterable[str]) -> None:
        """Raises `ConfigError` if one of the parameters, which shall be updated whole, is cut."""
        for name in names:
            if name in self.slicings:
                raise ConfigError(
                    f"zero.whole_parameters: {name} is cut over {self.axis.size} tensor-parallel ranks, and no rank "
                    "has it whole",
                    hint='Use an elementwise optimizer such as "adamw" for it, or parallel.tp = 1.',
                )

    def watch(self, model: nn.Module, blocks: Sequence[nn.Module], linears: Linears) -> None:
        """From now on `model` computes with parts."""
        if self.active:
            cut = [info for info in self.infos(model) if info.slicing is not None]
            self._cut_parameters = [(model.get_parameter(info.name), info) for info in cut]
            self._wiring = Wiring(self, model, blocks, linears)

    def partial(self, shards: Sequence[Shard]) -> Partial:
        """What adds up gradients of which each rank has a part."""
        return Partial(self.axis, self._wiring.summed if self._wiring is not None else {}, shards)

    def whole(self, model: nn.Module, infos: Iterable[ParamInfo]) -> AbstractContextManager[None]:
        """The model is plain, with whole parameters. Those of `infos` are there. Entering is collective."""
        return self._whole([(model.get_parameter(info.name), info) for info in infos if info.slicing is not None])

    def whole_module(self, module: nn.Module) -> AbstractContextManager[None]:
        """The same of a module whose parameters are there."""
        names = {id(parameter): info for parameter, info in self._cut_parameters}
        own = [(parameter, names[id(parameter)]) for parameter in module.parameters() if id(parameter) in names]
        return self._whole(own)

    @contextmanager
    def _whole(self, cut: Sequence[tuple[nn.Parameter, ParamInfo]]) -> Iterator[None]:
        parts = [(parameter, parameter.data) for parameter, _ in cut]
        for parameter, info in cut:
            parameter.data = self.join(info, parameter.data.view(-1)).view(info.shape)
        active = self.active
        self.activate(active=False)
        try:
            yield
        finally:
            self.activate(active=active)
            for parameter, data in parts:
                parameter.data = data

    def close(self) -> None:
        """Modules are plain again; parameters are still parts."""
        self.activate(active=False)
        if self._wiring is not None:
            self._wiring.close()

    def activate(self, *, active: bool) -> None:
        """Whether modules compute with parts."""
        self.active = active
        for module, name, whole, part in self.attributes:
            setattr(module, name, part if active else whole)


def split(
    blueprint: Blueprint,
    axis: Axis,
    streams: Streams,
    plan: Mapping[str, str],
    options: Parallel,
) -> tuple[Blueprint, TensorParallel]:
    """This rank's part of a model that has no weights yet. `plan`: the model's, before which that of `options` comes.

    Raises `ConfigError` for a plan that does not fit, with the numbers of ranks that would. Collective if weights came
    with the model.
    """
    model = blueprint.model
    tensor = TensorParallel(axis, streams, sequence=options.sequence_parallel)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    chosen = choose(plan, names, options.plan)
    if axis.size == 1:
        return blueprint, tensor
    refuse_compiled(model, "parallel.tp > 1")
    tensor.chosen = chosen
    tensor.slicings = slicings(model, chosen, axis.size)
    if not tensor.slicings:
        raise ConfigError(
            f"parallel.tp = {axis.size}, and no plan says what of the model is cut",
            hint='Give one in [parallel.plan], such as "blocks.*.up" = "colwise" and "blocks.*.down" = "rowwise".',
        )
    tensor.attributes = list(_attributes(model, tensor))
    values = {name: _of_rank(blueprint, name, tensor) for name in blueprint.values}
    for info in params.collect(model):
        if info.name in tensor.slicings:
            _shrink(model, info, tensor.slicings[info.name].local_shape(info.shape))
    for name, buffer in model.named_buffers():
        if buffer.numel() and not buffer.is_meta:
            first_ranks = _first_ranks(buffer, axis, name)
            buffer.copy_(first_ranks)
    tensor.activate(active=True)
    return replace(blueprint, values=values), tensor


def _attributes(model: nn.Module, tensor: TensorParallel) -> Iterator[tuple[nn.Module, str, Any, Any]]:
    """(module, name, value, value for a part) of what the plan divides."""
    for one in tensor.chosen:
        module = module_at(model, one.path)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and one.style("vocab"):
            rows = tensor.slicings[f"{one.path}.weight"].local_extent
            mine = module.padding_idx - tensor.axis.index * rows
            yield module, "padding_idx", module.padding_idx, mine if 0 <= mine < rows else None
        for style in one.styles:
            by = tensor.axis.size
            if style.name == "regroup":
                by = max(slicing.copies for name, slicing in tensor.slicings.items() if one.holds(name))
            for name in style.arguments if style.name in ("divide", "regroup") else ():
                value = getattr(module, name, None)
                if not isinstance(value, int) or value % by:
                    raise ConfigError(
                        f'parallel.plan: "{one.path}" has the style {style}, and its {name} is {value!r}',
                        hint=f"It must be a whole number that {by} divides.",
                    )
                yield module, name, value, value // by  # type: ignore[misc]


def _of_rank(blueprint: Blueprint, name: str, tensor: TensorParallel) -> Values:
    """This rank's part of a parameter's first values."""
    values, axis, slicing = blueprint.values[name], tensor.axis, tensor.slicings.get(name)
    given = name in blueprint.given
    if given and not blueprint.model.get_parameter(name).is_meta:
        kept = blueprint.model.get_parameter(name).detach()  # The parameter itself is about to shrink.
        values = lambda: kept  # noqa: E731

    def make() -> Tensor:
        whole = _first_ranks(values(), axis, name) if given else values()
        return whole if slicing is None else _cut(whole, slicing, axis.index)

    return make


def _first_ranks(value: Tensor, axis: Axis, name: str) -> Tensor:
    whole = value.detach().clone(memory_format=torch.contiguous_format)
    if whole.numel():
        axis.broadcast(whole.view(-1).view(torch.uint8), 0, f"first values of {name}").wait()
    return whole


def _shrink(model: nn.Module, info: ParamInfo, shape: tuple[int, ...]) -> None:
    parameter = model.get_parameter(info.name)
    if parameter.is_meta:
        part = nn.Parameter(torch.empty(shape, dtype=info.dtype, device="meta"), requires_grad=info.trainable)
        params.replace(model, info, part)
    else:
        parameter.data = parameter.data.new_empty(shape)


def _cut(whole: Tensor, slicing: Slicing, index: int) -> Tensor:
    parts = [whole.narrow(slicing.dim, start, stop - start) for start, stop in slicing.ranges[index]]
    if slicing.padding[index]:
        extents = (slicing.padding[index] if dim == slicing.dim else size for dim, size in enumerate(whole.shape))
        parts.append(whole.new_zeros(tuple(extents)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=slicing.dim)
