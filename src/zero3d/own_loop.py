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

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from zero3d import params
from zero3d.access import Access, Index, Uncut, refuse_sharded
from zero3d.comm.diverged import diverged
from zero3d.comm.mesh import Mesh, mesh_over, open_mesh, ranks_started
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.config import Config
from zero3d.editing import edit
from zero3d.errors import ConfigError, NonFiniteError, UsageError
from zero3d.initial import draw
from zero3d.layout import Layout
from zero3d.modes import in_mode
from zero3d.optim.clip import clip
from zero3d.optim.own import OwnOptimizers
from zero3d.optim.tally import Part, Totals, agree
from zero3d.params import ParamInfo
from zero3d.pipeline.stage import whole_count
from zero3d.precision import Scaler, dtypes_for, native_bf16
from zero3d.recompute import Recomputed, recompute
from zero3d.zero.levels import options_for, replica_for
from zero3d.zero.own_turns import OwnTurns
from zero3d.zero.replica import ZeroReplica
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
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}, no nn.Module", hint="Pass the module itself.")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"{optimizer!r} is no torch optimizer",
                hint="Pass optimizers that were made from model.parameters(); the level is level=3.",
            )
    tree: dict[str, Any] = config.model_dump(exclude_unset=True) if isinstance(config, Config) else dict(config or {})
    tree["zero"] = {**tree.get("zero", {}), "level": level}
    asked = Config.load(tree)
    _refuse_unfit(asked)
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


@dataclass(frozen=True, kw_only=True)
class OwnParts:
    """A model that is sharded for a loop of the user's own."""

    model: nn.Module
    infos: Sequence[ParamInfo]
    axis: RecordedAxis
    device: torch.device
    recomputed: Sequence[Recomputed]
    replica: ZeroReplica
    optimizer: OwnOptimizers
    scaler: Scaler
    turns: OwnTurns
    access: Access
    tensor: Uncut = field(default_factory=Uncut)

    def close(self) -> None:
        """Modules and gradients are the user's again."""
        self.turns.close()
        self.access.close()
        self.replica.close()
        for block in self.recomputed:
            block.close()


class Sharded:
    """What `shard` returns: the gradients' and the optimizers' side of a sharded model."""

    def __init__(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        self._mesh, self._config = mesh, config
        self._optimizers = OwnOptimizers(self._before_step, self._after_step)
        self._count: Tensor | None = None
        self._counts_next = False
        self._backwards = 0
        self._totals: Totals | None = None
        self._coefficient = 1.0
        self._divisor = 0
        self._closed = False
        self._used: set[torch.optim.Optimizer] = set()
        self._parts = self._assemble(model)

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        return self._parts.model

    @property
    def rank(self) -> int:
        """My number among the ranks that the model is sharded over."""
        return self._mesh.rank

    @property
    def world(self) -> int:
        """How many ranks these are."""
        return self._mesh.layout.world

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, this rank's slice, flat, of the fp32 master weights) of each trainable parameter: what optimizers are
        made of. A slice may be empty; all ranks have the same names in the same order."""
        yield from self._optimizers.slices.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The slices of `named_parameters`: flat, fp32."""
        yield from self._optimizers.slices.values()

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer`, made from parameters of the model or from `parameters()`, updates this rank's slices from now
        on, in the groups and with the settings that it has."""
        if optimizer not in self._optimizers.names_of:
            self._optimizers.adopt(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step()`; an optimizer that is new here is adopted first. Collective."""
        self.adopt(optimizer)
        optimizer.step()

    def accumulate(self, on: bool = True) -> AbstractContextManager[None]:
        """A backward inside is not the last of its step. Never needed: it saves reductions where gradients are held
        whole (zero.reduce = "step"), and changes no number. The same loop serves all levels. `on`: False has no
        effect."""
        return self._parts.turns.accumulate(on)

    def average_over(self, count: Tensor | int) -> None:
        """Losses are sums over `count` targets on this rank: gradients are divided by the targets of all ranks
        together. Counts of several backwards of a step add up. Without a call gradients are averaged over ranks, as
        DistributedDataParallel does. Raises `UsageError` once the norm has been asked for."""
        count = whole_count(count, "average_over was given")
        if self._totals is not None and not self._used:
            raise UsageError(
                "average_over comes after the norm was asked for, and would change it",
                hint="Call it before clip_grad_norm_, grad_norm and grad_of.",
            )
        if self._parts.turns.idle and not self._counts_next:
            self._count, self._counts_next = None, True  # It comes before its backward.
        self._count = count if self._count is None else self._count + count

    def clip_grad_norm_(self, limit: float) -> float:
        """As torch.nn.utils.clip_grad_norm_ on the whole model: the norm before clipping. Collective."""
        norm = self._norm(self._settled())
        self._coefficient *= min(1.0, limit / (norm + 1e-6))
        return norm

    def grad_norm(self) -> float:
        """Of the averaged gradients, as clipped so far. Between backward and `optimizer.step()`. Collective."""
        return self._norm(self._summed())

    @contextmanager
    def gathered(self, *, write: bool = False) -> Iterator[nn.Module]:
        """The model as plain torch with whole weights and in evaluation mode, to be read; with `write` what rank 0
        writes is kept. Entering is collective, and leaving with `write`."""
        with self._parts.access.gathered(write=write), in_mode(self.model, train=False), torch.no_grad():
            yield self.model

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole tensors under the model's own names, on every rank. Collective."""
        return self._parts.access.state()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> tuple[list[str], list[str]]:
        """Whole tensors become weights and buffers; rank 0's are everyone's. -> names missing in `state`, names that
        the model lacks. Collective."""
        return self._parts.access.load(state, strict=strict)

    def grad_of(self, name: str, part: Index = None) -> Tensor:
        """The whole averaged gradient of a parameter before clipping, fp32, or a `part` of it. Between backward and
        `optimizer.step()`. Collective."""
        self._summed()
        return self._parts.access.gradient_of(name, part).div_(self._divisor)

    def weight_of(self, name: str, part: Index = None) -> Tensor:
        """The whole fp32 master weights of a parameter, or a `part` of them. Collective."""
        return self._parts.access.weight_of(name, part)

    def set_weight(self, name: str, value: Tensor, part: Index = None) -> None:
        """A parameter, or a `part` of it, becomes rank 0's `value`. Collective."""
        self._parts.access.set_weight(name, value, part)

    def edit(self, change: Callable[[nn.Module], Any]) -> None:
        """`change(model)` on the whole model, the same on every rank: other modules, `requires_grad_` of some.
        Parameters of unchanged name and shape keep master weights and optimizer state; optimizers get slices of those
        in their groups that are trained now. A sum of gradients under way is dropped. Collective."""
        self._refuse_closed()
        self._closed = True
        self._parts = edit(self._parts, self._mesh.sharding, change, self._assemble)
        self._closed = False

    def close(self) -> None:
        """Gradients stay with the parameters again, and all hooks leave the model; weights can still be read."""
        self._closed = True
        self._parts.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError(
                "what zero3d.shard gave is closed, or an edit of it has failed",
                hint="Shard the model again, with new optimizers.",
            )

    def _assemble(self, model: nn.Module) -> OwnParts:
        config, mesh = self._config, self._mesh
        refuse_sharded(model)
        dtypes = dtypes_for(config)
        blueprint = draw(model, config.run.seed)
        infos = params.collect(model)
        dtypes.check(infos)
        _, blocks = find_blocks(model, config.model.blocks)
        recomputed = recompute(model, blocks, config.recompute.mode)
        units = split_units(model, blocks)
        replica = replica_for(options_for(config), mesh.sharding, blueprint, units, dtypes, mesh.device)
        self._optimizers.cut(model, infos, replica.shards, mesh.device)
        self._forget_totals()
        return OwnParts(
            model=model,
            infos=infos,
            axis=mesh.axes["dp"],
            device=mesh.device,
            recomputed=recomputed,
            replica=replica,
            optimizer=self._optimizers,
            scaler=Scaler(enabled=False),
            turns=OwnTurns(
                model,
                infos,
                replica,
                self._optimizers.slices,
                began=self._backward_begins,
                changed=self._sum_changes,
            ),
            access=Access(model, infos, replica, [mesh.axes["dp"]], Uncut(), Uncut()),
        )

    def _backward_begins(self) -> None:
        self._optimizers.forget_steps()
        self._backwards += 1
        if self._backwards == 2 and not self._optimizers.names_of and self._optimizers.slices:
            warnings.warn(
                "no optimizer is known to what zero3d.shard gave, so nothing will be updated: make the optimizer first "
                "and pass it to zero3d.shard, or call sharded.adopt(optimizer)",
                stacklevel=2,
            )

    def _sum_changes(self, anew: bool) -> None:
        if anew and not self._counts_next:
            self._count = None
        self._counts_next = False
        self._forget_totals()

    def _forget_totals(self) -> None:
        self._totals, self._coefficient = None, 1.0
        self._used.clear()

    def _settled(self) -> Totals:
        """All ranks' sums, once a step: known already where another optimizer has taken it."""
        self._refuse_closed()
        parts = self._parts
        if self._used == set(self._optimizers.names_of):
            self._forget_totals()
        elif not self._used and parts.turns.thrown_away:
            self._totals = None
        if self._totals is None:
            coefficient = self._coefficient  # What one optimizer threw away leaves the others' clipped.
            arrivals = dict.fromkeys(parts.turns.settle(), 0)
            part = Part(
                losses=[torch.zeros((), device=parts.device)],
                counts=[(torch.tensor(1) if self._count is None else self._count).to(parts.device)],
                norms=parts.replica.norms() if self._mesh.counts_norms else (),
                arrivals={**parts.replica.arrivals(), **arrivals},
                digest=parts.axis.digest,
            )
            totals = agree(part, parts.axis, self._mesh.model, parts.device)
            if not totals.same_calls:
                raise diverged(parts.axis, parts.device, "since the last step")
            parts.axis.start_step()
            self._totals, self._divisor, self._coefficient = totals, max(totals.count, 1), coefficient
        return self._totals

    def _summed(self) -> Totals:
        """`_settled` for who asks about gradients; raises on every rank where none of them has any."""
        totals = self._settled()
        if len(totals.unused) == len(self._parts.replica.arrivals()):
            self._forget_totals()
            raise UsageError(
                "no gradient has been summed since the last step, or since zero_grad",
                hint="Call grad_of and grad_norm between loss.backward() and optimizer.step().",
            )
        return totals

    def _norm(self, totals: Totals) -> float:
        return clip(totals.squares, self._divisor, 0.0).norm * self._coefficient

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._used:
            self._forget_totals()
        totals = self._settled()
        if not totals.finite:
            raise NonFiniteError(
                "gradients are not finite", hint="Nothing has been updated. Call optimizer.zero_grad() to go on."
            )
        self._parts.turns.end_sum()
        self._count, self._backwards = None, 0
        self._used.add(optimizer)
        if len(self._used) > 1:  # Another optimizer of the same model has taken its step already.
            return
        scale = self._coefficient / self._divisor
        for one in self._parts.replica.shards:
            one.gradient.mul_(scale)
            one.scaled = scale
        self._parts.turns.hand_over()
        for name in totals.unused:
            self._optimizers.slices[name].grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        names = self._optimizers.names_of[optimizer]
        self._parts.replica.publish(
            one for one in self._parts.replica.shards if any(slot.name in names for slot in one.bucket.slots)
        )


def _refuse_unfit(config: Config) -> None:
    """Settings that a loop of the user's own cannot honour."""
    precision, parallel = config.precision, config.parallel
    if parallel.tp > 1 or parallel.pp > 1:
        raise ConfigError(
            f"parallel.tp = {parallel.tp} and parallel.pp = {parallel.pp}: loops of your own shard over dp alone",
            hint="Use zero3d.Engine for tensor parallelism and pipeline stages.",
        )
    if config.offload.optimizer != "device":
        raise ConfigError(
            f'offload.optimizer = "{config.offload.optimizer}": loops of your own update on the device',
            hint="Use zero3d.Engine to offload.",
        )
    if precision.compute == "fp16":
        raise ConfigError(
            'precision.compute = "fp16" needs its loss scaled, and here the loss is yours',
            hint='Use zero3d.Engine, which scales it, or precision.compute = "bf16".',
        )
    if precision.gradients != "fp32":
        raise ConfigError(
            f'precision.gradients = "{precision.gradients}" is not for loops of your own',
            hint="An optimizer of yours reads fp32 gradients of fp32 master weights. Leave the key out.",
        )
    if config.zero.whole_parameters:
        raise ConfigError(
            "zero.whole_parameters is not for loops of your own: optimizers get slices there",
            hint="Use zero3d.Engine, or leave the key out.",
        )
