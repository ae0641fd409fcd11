"""What a configuration makes of a model, known before any rank starts and without its weights.

The model is cut by the code that cuts it on ranks, over an axis on paper: what would be refused there is refused here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero3d.blueprint import Blueprint
from zero3d.comm.paper_axis import PaperAxis
from zero3d.config import Config
from zero3d.linears import Linears
from zero3d.models.plans import tensor_plan
from zero3d.params import ParamInfo
from zero3d.pipeline.cut import Stages, cut
from zero3d.pipeline.schedules.own import find
from zero3d.randomness import Randomness
from zero3d.tensor.plan import Chosen
from zero3d.tensor.shapes import COLUMNS, ROWS
from zero3d.tensor.split import TensorParallel, split
from zero3d.zero.units import find_blocks


@dataclass(frozen=True, kw_only=True, eq=False)
class Outline:
    """The parameters of a model, whole, and what becomes of each.

    styles: parameter -> the style of the plan that cuts it, of those that are cut
    blocks: the path of each block -> the parameters that it is the first to have
    stages: which pp index has what; tensor: what has cut the model that this was made of
    """

    infos: Sequence[ParamInfo]
    styles: Mapping[str, str]
    blocks: Mapping[str, frozenset[str]]
    stages: Stages
    tensor: TensorParallel

    def patterns(self) -> dict[str, list[ParamInfo]]:
        """Parameters that differ in their block alone, by their name with `*` for it, in the model's order."""
        block_of = {name: path for path, names in self.blocks.items() for name in names}
        found: dict[str, list[ParamInfo]] = {}
        for info in self.infos:
            path = block_of.get(info.name, "")
            parent, _, _ = path.rpartition(".")
            pattern = f"{parent}.*".lstrip(".") + info.name.removeprefix(path) if path else info.name
            found.setdefault(pattern, []).append(info)
        return found

    def blocks_of(self, pp: int) -> list[range]:
        """The blocks of each stage that this index on pp has; of a stage without blocks an empty range."""
        return self.stages.blocks_of(pp)

    def outside_of(self, pp: int) -> list[str]:
        """The modules outside all blocks of which this index on pp has parameters."""
        inside = frozenset[str]().union(*self.blocks.values())
        names = [info.name for info in self._of(pp) if info.name not in inside]
        return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))

    def num_outside(self, pp: int) -> int:
        """Elements outside all blocks that a rank of this index on pp has, before ZeRO shards them."""
        inside = frozenset[str]().union(*self.blocks.values())
        return sum(info.local.numel for info in self._of(pp) if info.name not in inside)

    def held(self, pp: int) -> list[ParamInfo]:
        """What a rank of this index on pp has, in its own shapes, before ZeRO shards it."""
        return [info.local for info in self._of(pp)]

    def _of(self, pp: int) -> list[ParamInfo]:
        return [info for info in self.infos if pp in self.stages.ranks_of(info.name)]


def outline(model: nn.Module, config: Config) -> Outline:
    """The outline of `model`, which is used up by it. `config`: resolved.

    Raises `ConfigError` or `UsageError` for a plan or a number of ranks that does not fit, with what would.
    """
    parallel = config.parallel
    _, blocks = find_blocks(model, config.model.blocks)
    owned = _owned(model, blocks)
    streams = Randomness(config.run.seed, 0, torch.device("cpu"))
    blueprint = Blueprint(model, {}, frozenset())
    axis = PaperAxis(parallel.tp)
    _, tensor = split(blueprint, axis, streams, tensor_plan(model), parallel)
    infos = tensor.infos(model)
    stages = _stages(model, blocks, config)
    tensor.watch(model, blocks, Linears())
    styles = {info.name: style for info in infos if info.slicing for style in _styles(info, tensor.chosen)}
    return Outline(infos=infos, styles=styles, blocks=owned, stages=stages, tensor=tensor)


def _stages(model: nn.Module, blocks: Sequence[nn.Module], config: Config) -> Stages:
    parallel = config.parallel
    return cut(model, blocks, find(parallel.schedule), parallel, ranks=parallel.pp, index=0)


def _owned(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, frozenset[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    paths = {id(module): path for path, module in model.named_modules()}
    taken: set[str] = set()
    owned = {}
    for block in blocks:
        mine = frozenset(names[id(parameter)] for parameter in block.parameters()) - taken
        taken |= mine
        owned[paths[id(block)]] = mine
    return owned


def _styles(info: ParamInfo, chosen: Sequence[Chosen]) -> list[str]:
    """Those that cut it, by whatever name."""
    names = (info.name, *info.ties)
    found = [one for one in chosen if any(one.holds(name) for name in names)]
    return [str(style) for one in found[-1:] if (style := one.style(*COLUMNS, *ROWS))]
