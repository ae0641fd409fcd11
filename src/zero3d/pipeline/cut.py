"""Which stage has what of a model, and which stages this rank has."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from zero3d.config import Parallel
from zero3d.errors import ConfigError
from zero3d.pipeline.gates import Gate
from zero3d.pipeline.partition import Cost, by_hand, partition
from zero3d.pipeline.schedules.registry import Named
from zero3d.unfit import refuse_captures, refuse_compiled


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A model in stages.

    blocks: the blocks of each stage; holders: pp index of each stage; mine: the stages of this rank, in their order;
    stages_of: by the names of parameters, the stages that use it; gates: of all modules
    """

    blocks: Sequence[range]
    holders: Sequence[int]
    mine: Sequence[int]
    stages_of: Mapping[str, frozenset[int]]
    gates: Sequence[Gate]

    @property
    def number(self) -> int:
        return len(self.blocks)

    def has(self, name: str) -> bool:
        """Whether this rank has parameter `name`."""
        return bool(self.stages_of[name] & set(self.mine))

    def blocks_of(self, pp: int) -> list[range]:
        """The blocks of each stage that this index on pp has, in the order of its stages."""
        return [blocks for blocks, holder in zip(self.blocks, self.holders) if holder == pp]

    def rank_of_buffer(self, name: str) -> int:
        """The pp index of the first stage whose modules have buffer `name`."""
        owner = next((gate for gate in self.gates if name.startswith(f"{gate.path}.") and gate.stages), None)
        return self.holders[min(owner.stages)] if owner is not None and owner.stages else 0

    def ranks_of(self, name: str) -> list[int]:
        """pp indices that have parameter `name`, in the order of their first stage that uses it."""
        return list(dict.fromkeys(self.holders[stage] for stage in sorted(self.stages_of[name])))


def cut(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    schedule: Named,
    options: Parallel,
    *,
    ranks: int,
    index: int,
) -> Stages:
    """Over `ranks` of pp, of which this is number `index`. Stages are cut by the number of their blocks' parameters,
    unless `options` says where. Raises `ConfigError` where the model cannot be cut so."""
    number = ranks * options.stages_per_rank
    needed = schedule.stages_per_rank
    if ranks > 1 and needed not in (None, options.stages_per_rank):
        raise ConfigError(
            f'parallel.schedule = "{options.schedule}" has {needed} stage{"s" * (needed != 1)} on each rank, and '
            f"parallel.stages_per_rank = {options.stages_per_rank}",
            hint=f"Set parallel.stages_per_rank = {needed}"
            + (', or parallel.schedule = "interleaved".' if needed == 1 else "."),
        )
    schedule.check_stages(number, ranks)
    if not blocks and number > 1:
        raise ConfigError(
            f"parallel.pp = {ranks}, and no list of repeated blocks was found in the model",
            hint='Name it with model.blocks = "path.of.the.list", "" where the model itself is a Sequential. A model '
            "without blocks that follow each other cannot be cut into stages.",
        )
    paths = {id(module): name for name, module in model.named_modules()}
    _refuse_other_models(model, blocks, paths, number)
    costs = [Cost(time=sum(one.numel() for one in block.parameters())) for block in blocks]
    outside = list(_outside(model, blocks, paths, number, options))
    ranges = _ranges(costs, number, options.stage_blocks, _edge(model, outside, 0), _edge(model, outside, number - 1))
    stage_of_block = {block: stage for stage, mine in enumerate(ranges) for block in mine}
    gates = [
        Gate(path=paths[id(block)], block=at, stages=frozenset([stage_of_block[at]]), random=False)
        for at, block in enumerate(blocks)
    ]
    gates += outside
    placement = schedule.placement(number, ranks)
    holders = [next(rank for rank, stages in enumerate(placement) if stage in stages) for stage in range(number)]
    return Stages(
        blocks=ranges,
        holders=holders,
        mine=sorted(placement[index]),
        stages_of=_stages_of(model, gates, number),
        gates=gates if number > 1 else [],
    )


def _ranges(costs: Sequence[Cost], number: int, sizes: Sequence[int], before: Cost, after: Cost) -> list[range]:
    if sizes:
        return by_hand(sizes, len(costs), number)
    if number == 1:
        return [range(len(costs))]
    return list(partition(costs, number, before=before, after=after).blocks)


def _edge(model: nn.Module, outside: Sequence[Gate], stage: int) -> Cost:
    """An embedding is looked up, not multiplied with."""
    modules = [model.get_submodule(gate.path) for gate in outside if gate.stages == frozenset([stage])]
    multiplied = [parameter for one in modules if not isinstance(one, nn.Embedding) for parameter in one.parameters()]
    return Cost(time=sum(parameter.numel() for parameter in multiplied))


def _outside(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    paths: Mapping[int, str],
    number: int,
    options: Parallel,
) -> Iterator[Gate]:
    """The largest modules without blocks in them."""
    inside = {id(module) for block in blocks for module in block.modules()}
    order = [id(module) for module in model.modules()]
    start = min((order.index(id(block)) for block in blocks), default=0)
    taken: list[str] = []
    for at, (path, module) in enumerate(model.named_modules()):
        if not path or id(module) in inside or any(path.startswith(f"{one}.") for one in taken):
            continue
        if any(id(one) in inside for one in module.modules()):
            continue
        taken.append(path)
        stage = 0 if at < start else number - 1
        for patterns, chosen in ((options.first_stage, 0), (options.last_stage, number - 1)):
            stage = chosen if any(fnmatchcase(path, pattern) for pattern in patterns) else stage
        has_parameters = any(True for _ in module.parameters())
        random = any(isinstance(one, nn.modules.dropout._DropoutNd) for one in module.modules())
        yield Gate(path=path, block=None, stages=frozenset([stage]) if has_parameters else None, random=random)


def _stages_of(model: nn.Module, gates: Sequence[Gate], number: int) -> dict[str, frozenset[int]]:
    """What no gate has, such as a parameter of the model's own, every stage has."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, set[int]] = {name: set() for name in names.values()}
    for gate in gates:
        for parameter in model.get_submodule(gate.path).parameters():
            found[names[id(parameter)]] |= gate.stages or set()
    return {name: frozenset(stages or range(number)) for name, stages in found.items()}


def _refuse_other_models(model: nn.Module, blocks: Sequence[nn.Module], paths: Mapping[int, str], number: int) -> None:
    if number == 1:
        return
    refuse_captures(model, "parallel.pp > 1", "those of other stages are not there")
    lists = {paths[id(block)].rpartition(".")[0] for block in blocks}
    if len(lists) > 1:
        raise ConfigError(
            f"parallel.pp > 1, and the model has several lists of blocks: {', '.join(sorted(lists))}",
            hint="Stages are cut from one list whose blocks run one after the other. Name it with model.blocks, or use "
            "parallel.tp and zero.level = 3 for models such as encoder-decoders.",
        )
    refuse_compiled(model, "parallel.pp > 1")
