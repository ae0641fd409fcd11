"""Which module of a cut model computes how: stand-ins for linear layers, hooks for the others."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero3d.errors import ConfigError, UsageError
from zero3d.linears import Linears
from zero3d.slicing import Slicing
from zero3d.stand_in import StandIns
from zero3d.tensor.linear import Column, Door
from zero3d.tensor.modules import (
    ColumnPart,
    Cuts,
    EmbeddingPart,
    RegionPart,
    RowPart,
    StandIn,
)
from zero3d.tensor.plan import Chosen
from zero3d.tensor.shapes import COLUMNS, ROWS, first_names, is_transposed, module_at
from zero3d.tensor.trial import Trial
from zero3d.tensor.unnamed import Unnamed
from zero3d.unfit import refuse_captures

OUTPUTS = {"vocab": "logits", "colwise_gather_output": "whole"}
"""What becomes of a column's outputs; of all others they stay cut."""


class Split(Cuts, Protocol):
    """What the wiring must know of a cut model."""

    sequence: bool
    slicings: dict[str, Slicing]
    chosen: Sequence[Chosen]

    def whole_module(self, module: nn.Module) -> AbstractContextManager[None]: ...


class Wiring:
    """Of one model, until it is closed.

    summed: parameters that several ranks hold alike while each computes a part of the gradient's sum -> these ranks
    """

    def __init__(self, cut: Split, model: nn.Module, blocks: Sequence[nn.Module], linears: Linears) -> None:
        self._cut = cut
        self._model = model
        self._linears = linears
        self._blocks = {id(module) for block in blocks for module in block.modules()}
        self._names = first_names(model)
        self._stand_ins = StandIns(model)
        self._hooks: list[RemovableHandle] = [model.register_forward_pre_hook(self._shut_doors)]
        self._doors: list[Door] = []
        outer: list[str] = []
        if cut.sequence:
            self._refuse_sequence(blocks)
            outer = [one.path for one in cut.chosen if one.style("sequence_end") or self._is_outer_column(one)]
        layers = [one for one in cut.chosen if one.style(*COLUMNS, *ROWS) and self._is_linear(one)]
        for parent in dict.fromkeys(one.parent for one in layers):
            self._wire_linears([one for one in layers if one.parent == parent])
        for one in cut.chosen:
            self._wire_module(one)
        if cut.sequence:
            self._before(blocks[0], RegionPart(cut, "sequence before the first block", blocks[0]).split)
            self._refuse_unnamed(blocks[0], outer)
        self._try_out(blocks)
        self.summed = {name: self._holders(name) for name in self._summed(blocks)}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._stand_ins.close()

    def _shut_doors(self, *_: object) -> None:
        """What came in by a forward before is of no use to the next."""
        for door in self._doors:
            door.shut()

    def _is_linear(self, one: Chosen) -> bool:
        module = module_at(self._model, one.path)
        return module is not None and not isinstance(module, nn.Embedding)

    def _try_out(self, blocks: Sequence[nn.Module]) -> None:
        """One module of each kind whose layers the user's plan cuts, and that gives sums of all parts."""
        cut, kinds = self._cut, set()
        for parent in dict.fromkeys(one.parent for one in cut.chosen if one.style(*COLUMNS)):
            mine = [one for one in cut.chosen if one.parent == parent]
            module = self._model.get_submodule(parent)
            kind = (type(module), tuple(str(style) for one in mine for style in one.styles))
            own = any(one.own for one in cut.chosen if one.parent == parent or one.path == parent)
            if not own or not parent or kind in kinds or not any(one.style(*ROWS) for one in mine):
                continue
            kinds.add(kind)
            on_parts = cut.sequence and id(module) in self._blocks and not self._in_whole(parent)
            # The first block cuts the sequence itself.
            enters = on_parts and module is not blocks[0]
            trial = Trial(cut, cut, parent, module, cut_inputs=enters, cut_outputs=on_parts)
            self._hooks.append(trial.hook)

    def _wire_linears(self, siblings: Sequence[Chosen]) -> None:
        """Those of one module."""
        cut, door, parent = self._cut, Door(), siblings[0].parent
        self._doors.append(door)
        columns = {one: self._column(one.path) for one in siblings}
        gathered = any(one.style("gather") and one.holds(parent) for one in cut.chosen)
        ends = any(one.style("sequence_end") for one in cut.chosen)
        for one, column in columns.items():
            in_blocks = id(column.module) in self._blocks
            on_parts = cut.sequence and not self._in_whole(one.path)
            style = one.style(*COLUMNS, *ROWS)
            assert style is not None
            part: ColumnPart | RowPart
            if style.name in ROWS:
                part = RowPart(
                    cuts=cut,
                    label=one.path,
                    column=column,
                    door=door,
                    splits=style.name == "rowwise_split_input",
                    scatters=on_parts and in_blocks,
                )
            else:
                part = ColumnPart(
                    cuts=cut,
                    label=one.path,
                    column=column,
                    siblings=[columns[other] for other in siblings if other.style(*COLUMNS)],
                    door=door,
                    gathers=on_parts and (in_blocks or not ends),
                    enters=not (cut.sequence and gathered),
                    output=OUTPUTS.get(style.name, "cut"),
                    extent=cut.slicings[self._names[column.module.weight]].extent,
                )
            self._stand_ins.swap(column.module, StandIn, _part=part)

    def _column(self, path: str) -> Column:
        module = self._model.get_submodule(path)
        return Column(module, self._linears, transposed=is_transposed(module))

    def _wire_module(self, one: Chosen) -> None:
        module, cut = module_at(self._model, one.path), self._cut
        if module is None:
            return
        part = RegionPart(cut, one.path, module)
        if one.style("experts"):
            self._before(module, part.enter_all)
            self._after(module, part.reduce_output)
        if one.style("vocab") and isinstance(module, nn.Embedding):
            slicing = cut.slicings[self._names[module.weight]]
            rows = slicing.local_extent
            embedding = EmbeddingPart(cut, one.path, cut.axis.index * rows, rows, slicing.extent)
            self._before(module, embedding.before)
            self._after(module, embedding.after)
        if cut.sequence and one.style("gather"):
            self._before(module, part.gather_summed)
        if cut.sequence and one.style("whole"):
            self._before(module, part.gather)
            self._after(module, part.split_output)
        if cut.sequence and one.style("sequence_end"):
            self._after(module, part.gather_output)

    def _before(self, module: nn.Module, hook: object) -> None:
        self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))  # type: ignore[arg-type]

    def _after(self, module: nn.Module, hook: object) -> None:
        self._hooks.append(module.register_forward_hook(hook))  # type: ignore[arg-type]

    def _refuse_sequence(self, blocks: Sequence[nn.Module]) -> None:
        """Raises for a model of which nothing says where its sequence is cut, or becomes whole again."""
        if not blocks:
            raise UsageError(
                "parallel.sequence_parallel = true, and no list of repeated blocks was found in the model",
                hint='Name it with model.blocks = "path.of.the.list", or set parallel.sequence_parallel = false.',
            )
        refuse_captures(self._model, "parallel.sequence_parallel = true", "each rank has a part of the sequence")
        named = any(one.style("sequence", "sequence_end") for one in self._cut.chosen)
        gathers = any(one.style("sequence_end") or self._is_outer_column(one) for one in self._cut.chosen)
        if not (named and gathers):
            raise ConfigError(
                "parallel.sequence_parallel = true, and the plan does not say where the sequence becomes whole again",
                hint="Give the last module that runs on parts of it, such as the norm after the blocks, the style "
                '"sequence_end" in [parallel.plan]; or "sequence" where an output layer with cut columns comes next.',
            )

    def _refuse_unnamed(self, first: nn.Module, ends: Sequence[str]) -> None:
        """`ends`: the modules after which the sequence is whole again."""
        unnamed = Unnamed(self._cut, self._model, self._blocks, self._cut.chosen)
        self._hooks += [*unnamed.hooks, first.register_forward_pre_hook(unnamed.enter)]
        self._hooks += [self._model.get_submodule(path).register_forward_hook(unnamed.leave) for path in ends]

    def _is_outer_column(self, one: Chosen) -> bool:
        """Whether it is a linear layer outside the blocks whose input is gathered where the sequence is cut."""
        module = module_at(self._model, one.path)
        return one.style(*COLUMNS) is not None and self._is_linear(one) and id(module) not in self._blocks

    def _in_whole(self, path: str) -> bool:
        return any(one.style("whole") and one.holds(path) for one in self._cut.chosen)

    def _summed(self, blocks: Sequence[nn.Module]) -> list[str]:
        """Names of parameters."""
        cut = self._cut
        partial: set[int] = set()
        looked_after: set[int] = set()
        for one in cut.chosen:
            module = module_at(self._model, one.path) or nn.Module()
            own = {id(parameter) for parameter in module.parameters()}
            if one.style("partial") or (cut.sequence and one.style("sequence", "sequence_end")):
                partial |= own
            elif one.style("gather", "whole"):
                looked_after |= own
        for one in cut.chosen:
            bias = getattr(module_at(self._model, one.path), "bias", None)
            if cut.sequence and one.style(*ROWS) and isinstance(bias, Tensor) and not self._in_whole(one.path):
                partial.add(id(bias))
        if cut.sequence:
            partial |= {id(one) for block in blocks for one in block.parameters()} - looked_after
        return [
            name
            for name, parameter in self._model.named_parameters()
            if (id(parameter) in partial and name not in cut.slicings)
            or (name in cut.slicings and cut.slicings[name].copies > 1)
        ]

    def _holders(self, name: str) -> range:
        axis, slicing = self._cut.axis, self._cut.slicings.get(name)
        return range(axis.size) if slicing is None else slicing.holders(axis.index)
