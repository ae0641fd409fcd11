"""ZeRO for a loop of the user's own: forward, backward, clip, optimizer and scheduler stay where they are.

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sharded = zero3d.shard(model, optimizer, level=3)
    for x, y in data:
        loss = criterion(model(x), y)
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

Gradients leave the parameters as autograd makes them, are summed over ranks while backward goes on, and come back to
the optimizer as the flat slices that this rank updates. A step ends a sum of gradients, and so does
`optimizer.zero_grad()`; without either, backwards add up as they do in plain torch.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero3d import params
from zero3d.comm.mesh import Mesh, mesh_over, open_mesh, ranks_started
from zero3d.config import Config
from zero3d.errors import ConfigError, DivergedError, NonFiniteError, UsageError
from zero3d.initial import draw
from zero3d.layout import Layout
from zero3d.optim.clip import clip
from zero3d.optim.probe import is_elementwise
from zero3d.optim.tally import Part, Totals, agree
from zero3d.precision import dtypes_for, native_bf16
from zero3d.recompute import recompute
from zero3d.zero.levels import options_for, replica_for
from zero3d.zero.own_turns import OwnTurns
from zero3d.zero.units import find_blocks, split_units


def shard(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    level: int = 3,
    group: Any = None,
    config: Config | Mapping[str, Any] | None = None,
) -> "Sharded":
    """Shards `model`, and the state of `optimizers`, over the ranks of `group`. Collective.

    optimizers: made from parameters of `model`, without state yet; each must treat every element by itself
    group: a torch ProcessGroup, or an `Axis`; left out, all ranks that were started
    config: the sections [zero], [precision], [recompute] and model.blocks; `level` is [zero]'s

    The model stays the user's module, with rank 0's weights. Raises `ConfigError` or `UsageError` for what cannot be
    honoured.
    """
    tree: dict[str, Any] = config.model_dump(exclude_unset=True) if isinstance(config, Config) else dict(config or {})
    tree["zero"] = {**tree.get("zero", {}), "level": level}
    asked = Config.load(tree)
    if group is None:
        resolved = asked.resolved(ranks_started(), native_bf16(), own_batches=True)
        timeout = timedelta(seconds=resolved.run.timeout_seconds)
        mesh = open_mesh(Layout(dp=ranks_started()), timeout, resolved.zero.replicas)
    else:
        mesh = mesh_over(group)
        resolved = asked.resolved(mesh.layout.dp, native_bf16(), own_batches=True)
        if resolved.zero.replicas > 1:
            raise ConfigError("zero.replicas cuts all ranks into groups", hint="Leave out `group`, or the key.")
    sharded = Sharded(model, mesh, resolved)
    for optimizer in optimizers:
        sharded.adopt(optimizer)
    return sharded


class Sharded:
    """What `shard` returns: the gradients' and the optimizers' side of a sharded model."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        dtypes = dtypes_for(config)
        if dtypes.compute_rule is torch.float16:
            raise ConfigError(
                'precision.compute = "fp16" needs its loss scaled, and here the loss is yours',
                hint='Use zero3d.Engine, which scales it, or precision.compute = "bf16".',
            )
        if config.precision.gradients != "fp32":
            raise ConfigError(
                f'precision.gradients = "{config.precision.gradients}" is not for loops of your own',
                hint="An optimizer of yours reads fp32 gradients of fp32 master weights. Leave the key out.",
            )
        blueprint = draw(model, config.run.seed)
        self.model = model
        self.infos = params.collect(model)
        dtypes.check(self.infos)
        _, blocks = find_blocks(model, config.model.blocks)
        if config.recompute.mode == "block":
            recompute(blocks)
        self._mesh, self._axis, self._device = mesh, mesh.axes["dp"], mesh.device
        self._given = {id(parameter): name for name, parameter in model.named_parameters()}
        units = split_units(model, blocks)
        self._replica = replica_for(options_for(config), mesh.sharding, blueprint, units, dtypes, mesh.device)
        self._pieces = dict(self._made_pieces())
        self._turns = OwnTurns(model, self._replica, self._pieces, self._forget_totals)
        self._count: Tensor | int = 1
        self._totals: Totals | None = None
        self._coefficient = 1.0
        self._used: set[torch.optim.Optimizer] = set()
        self._adopted: dict[torch.optim.Optimizer, frozenset[str]] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, this rank's slice, flat, of the fp32 master weights) of each trainable parameter: what optimizers are
        made of. A slice may be empty; all ranks have the same names in the same order."""
        yield from self._pieces.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._pieces.values()

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer`, made from parameters of the model or from `parameters()`, updates this rank's slices from now
        on, in the groups and with the settings that it has."""
        if optimizer in self._adopted:
            return
        kind = type(optimizer)
        if not is_elementwise(kind.__name__, partial(_another, optimizer)):
            raise UsageError(
                f"optimizer {kind.__name__} looks at whole matrices, and here it would get slices of them",
                hint='Use zero3d.Engine with zero.whole_parameters = ["auto"].',
            )
        if optimizer.state:
            raise UsageError(
                f"{kind.__name__} has taken a step already, and its state is not sharded",
                hint="Call zero3d.shard before the first optimizer.step().",
            )
        mine = {id(piece): name for name, piece in self._pieces.items()}
        names: set[str] = set()
        for group in optimizer.param_groups:
            found = [mine.get(id(one)) or self._given.get(id(one)) for one in group["params"]]
            group["params"] = [self._pieces.get(name or "", one) for name, one in zip(found, group["params"])]
            names.update(name for name in found if name in self._pieces)
        if not names:
            raise UsageError(
                f"{kind.__name__} has no trainable parameter of the sharded model",
                hint="Make it from model.parameters() before zero3d.shard, or from sharded.parameters().",
            )
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        self._adopted[optimizer] = frozenset(names)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step()`; an optimizer that is new here is adopted first. Collective."""
        self.adopt(optimizer)
        optimizer.step()

    def accumulate(self, on: bool = True) -> AbstractContextManager[None]:
        """A backward inside is not the last of its step. Never needed: it saves reductions where gradients are held
        whole (zero.reduce = "step"), and changes no number. The same loop serves all levels. `on`: False has no
        effect."""
        return self._turns.accumulate(on)

    def average_over(self, count: Tensor | int) -> None:
        """This step's losses are sums over `count` targets on this rank: gradients are divided by the targets of all
        ranks together. Without a call they are averaged over ranks, as DistributedDataParallel does."""
        self._count = count

    def clip_grad_norm_(self, limit: float) -> float:
        """As torch.nn.utils.clip_grad_norm_ on the whole model: the norm before clipping. Collective."""
        totals = self._settled()
        clipping = clip(totals.squares, max(totals.count, 1), limit)
        self._coefficient = clipping.coefficient
        return clipping.norm

    def grad_norm(self) -> float:
        """Of the averaged gradients. Collective."""
        totals = self._settled()
        return clip(totals.squares, max(totals.count, 1), 0.0).norm

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The model as plain torch with whole weights, to be read. Entering is collective, leaving is not."""
        with self._replica.gathered(), torch.no_grad():
            yield self.model

    def close(self) -> None:
        """Gradients stay with the parameters again."""
        self._turns.close()
        self._replica.close()

    def _made_pieces(self) -> Iterable[tuple[str, nn.Parameter]]:
        found = {
            piece.name: nn.Parameter(one.master[piece.start : piece.stop])
            for one in self._replica.shards
            for piece in one.pieces
        }
        for info in self.infos:
            if info.trainable and info.numel:
                yield info.name, found.get(info.name, nn.Parameter(torch.empty(0, device=self._device)))

    def _forget_totals(self) -> None:
        self._totals, self._coefficient = None, 1.0
        self._used.clear()

    def _settled(self) -> Totals:
        """All ranks' sums, once a step: known already where another optimizer has taken it."""
        if self._used == set(self._adopted):
            self._forget_totals()
        if self._totals is None:
            self._turns.settle()
            one = torch.as_tensor(self._count, dtype=torch.int64, device=self._device)
            part = Part(
                losses=[torch.zeros((), device=self._device)],
                counts=[one],
                norms=self._replica.norms() if self._mesh.counts_norms else (),
                arrivals=self._replica.arrivals(),
                digest=self._axis.digest,
            )
            self._totals = agree(part, self._axis, self._device)
            self._axis.start_step()
        return self._totals

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._used:
            self._forget_totals()
        totals = self._settled()
        if not totals.same_calls:
            raise DivergedError(
                "ranks ran different modules: their collective calls do not match",
                hint="At ZeRO level 3 every rank must run the same blocks. Nothing has been updated.",
            )
        if not totals.finite:
            raise NonFiniteError(
                "gradients are not finite", hint="Nothing has been updated. Call optimizer.zero_grad() to go on."
            )
        self._turns.end_sum()
        self._count = 1
        self._used.add(optimizer)
        if len(self._used) > 1:  # Another optimizer of the same model has taken its step already.
            return
        scale = self._coefficient / max(totals.count, 1)
        for one in self._replica.shards:
            one.gradient.mul_(scale)
            one.scaled = scale
        for name in totals.unused:
            self._pieces[name].grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        names = self._adopted[optimizer]
        self._replica.publish(
            one for one in self._replica.shards if any(slot.name in names for slot in one.bucket.slots)
        )


def _another(optimizer: torch.optim.Optimizer, parameters: Sequence[Any]) -> torch.optim.Optimizer:
    """One of the same class and settings for other parameters, however its constructor is called."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    # A scheduler puts a `step` of its own into the object.
    other.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    other.state = defaultdict(dict)
    other.param_groups = []
    other._optimizer_step_pre_hooks = OrderedDict()
    other._optimizer_step_post_hooks = OrderedDict()
    other.add_param_group({"params": list(parameters)})
    return other
