"""Engine: a model, a loss and an optimizer that train as a configuration says."""

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero3d import census
from zero3d.access import Access, Index
from zero3d.assemble import Parts, assemble
from zero3d.comm.diverged import diverged
from zero3d.comm.mesh import open_mesh, ranks_started
from zero3d.config import Config
from zero3d.contracts import Batch, Loss, ModelSource, OptimizerChoice, Watcher
from zero3d.editing import edit, training_flags
from zero3d.errors import ConfigError, NonFiniteError, UsageError
from zero3d.layout import Layout
from zero3d.offload.budget import MachineNeed
from zero3d.optim.learning_rate import factor
from zero3d.params import ParamInfo
from zero3d.pipeline.calling import Call, split
from zero3d.pipeline.cut import Stages
from zero3d.pipeline.same import refuse_other_data
from zero3d.pipeline.uneven import Mine, Padding, even_out, own, together
from zero3d.precision import native_bf16
from zero3d.replicas import check_replicas
from zero3d.reports import EvaluateReport, StepReport
from zero3d.step import Done, evaluate_step, train_step
from zero3d.tensor.loss import whole_logits
from zero3d.trace.collect import collect
from zero3d.trace.span import Span, Trace
from zero3d.unwatched import UNWATCHED
from zero3d.watch import first_non_finite

MOST_SKIPS = 10
"""fp16: so many steps in a row without finite gradients are no matter of the loss scale any more."""
CHECKED_STEPS = 3
"""In which the ranks that share a replica are looked at for having the same data."""


class Engine:
    """Trains `model` over the ranks that were started, each of which makes an Engine with the same arguments.

    model: an nn.Module (any device; rank 0's weights are everyone's) or a function that builds one
    loss: loss(model_output, batch) -> (sum over counted targets, their number), or one mean tensor
    optimizer: a function parameters -> torch.optim.Optimizer, or a name; or {pattern of parameter names: either}, of
        which the first match wins. A function is called once for every shard, with flat tensors, so its optimizer must
        treat each element by itself; and once for every parameter of `zero.whole_parameters`, with a tensor of the
        parameter's own shape. Left out: what the configuration names.
    config: a Config, a dict of sections, or the path of a TOML file
    call: call(model, batch) -> model_output, where batches are not what `pipeline.calling.caller` expects

    Raises `ConfigError` or `UsageError` for what cannot be honoured, before anything is trained.
    """

    def __init__(
        self,
        model: ModelSource,
        loss: Loss,
        optimizer: OptimizerChoice | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        call: Call | None = None,
    ) -> None:
        given = Config.load(config if config is not None else {})
        _refuse_unheard(given, optimizer)
        own_batches = "global_batch" not in given.data.model_fields_set
        self.config = given.resolved(ranks_started(), native_bf16(), own_batches=own_batches)
        parallel = self.config.parallel
        assert parallel.dp != "auto", "resolved"
        layout = Layout(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp)
        self._mesh = open_mesh(layout, timedelta(seconds=self.config.run.timeout_seconds), self.config.zero.replicas)
        optimizer = self.config.optimizer.name if optimizer is None else optimizer
        self._assemble = partial(
            assemble, loss=loss, optimizer=optimizer, config=self.config, mesh=self._mesh, call=call
        )
        self._last: Done | None = None
        self._take(self._assemble(model))
        self._steps = 0
        self._updates = 0
        self._closed = False
        self._sent: Counter[str] = Counter()
        self._sample: Batch = None

    @property
    def rank(self) -> int:
        return self._mesh.rank

    @property
    def world(self) -> int:
        return self._mesh.layout.world

    @property
    def dp_index(self) -> int:
        return self._parts.axis.index

    @property
    def dp_size(self) -> int:
        return self._parts.axis.size

    @property
    def device(self) -> torch.device:
        return self._mesh.device

    @property
    def parameters(self) -> list[ParamInfo]:
        """What the model's parameters are, each once, whatever this rank holds of them."""
        return list(self._parts.infos)

    @property
    def stages(self) -> Stages:
        """Which index on pp has what of the model."""
        return self._parts.pipeline.stages

    @property
    def notice(self) -> str:
        """What the user should know about how the model was built; empty if nothing."""
        return self._parts.notice

    @property
    def host_memory(self) -> str:
        """What the ranks of each machine take of its memory; empty without offload."""
        return self._parts.homes.notice

    @property
    def host_needs(self) -> Sequence[MachineNeed]:
        """The same as numbers, one for each machine."""
        return self._parts.homes.machines

    def step(self, batch: Batch, watcher: Watcher = UNWATCHED) -> StepReport:
        """One update from this rank's part of the global batch. Collective. None, or no samples: nothing this time.

        The batch is cut into micro-batches of `parallel.micro_batch` samples along the first dim of its tensors.
        Ranks may come to different numbers of them. watcher: is told what this rank does, and when.
        Raises `NonFiniteError` when numbers went wrong for good; nothing has been updated then.
        """
        began = time.perf_counter()
        if not torch.is_grad_enabled():
            raise UsageError(
                "a step needs gradients, and they are switched off here",
                hint="Leave `with engine.gathered():` or `torch.no_grad()` first.",
            )
        self._mesh.enter_step(self._steps + 1)
        self._mesh.watch(watcher)
        self._parts.homes.watch(watcher)
        micro_batches = self._turns(batch)
        sent = {name: axis.sent_bytes for name, axis in self._mesh.axes.items()}
        if not self.model.training:  # Single modules may be in evaluation mode on purpose.
            self.model.train()
        steps = self.config.run.steps
        lr = factor(self._updates, steps, self.config.optimizer)
        done = train_step(self._parts, micro_batches, self._steps, lr, watcher)
        self._check(done, micro_batches)
        self._mesh.enter_step(0)
        self._sent.update({name: axis.sent_bytes - sent[name] for name, axis in self._mesh.axes.items()})
        self._sample, self._last = next(iter(own(micro_batches)), self._sample), done
        self._steps += 1
        self._updates += done.updated
        if self.config.run.check_every and self._steps % self.config.run.check_every == 0:
            self.check_replicas()
        return StepReport(
            step=self._steps,
            loss=done.totals.mean_loss,
            tokens=done.totals.count,
            grad_norm=done.clipping.norm,
            clip_coefficient=done.clipping.coefficient,
            lr=self._parts.optimizer.learning_rate,
            skipped=not done.updated,
            seconds=time.perf_counter() - began,
            loss_scale=self._parts.scaler.scale,
            offload=self._parts.homes.take_seconds(),
        )

    def evaluate(self, batch: Batch, *, outputs: bool = False) -> EvaluateReport:
        """The loss of `batch`, which may be None, without gradients or dropout; training flags are as before after it.
        Collective.

        outputs: also what the model gives, in the order of samples, on every rank that shares the replica (with
        pipeline stages as plain dicts, lists and tuples of tensors)"""
        micro_batches = self._turns(batch)
        found: list[Any] | None = [] if outputs else None
        with self._evaluating():
            totals = evaluate_step(self._parts, micro_batches, found)
            output = self._parts.pipeline.output([whole_logits(one) for one in found]) if found is not None else None
        self._sample = next(iter(own(micro_batches)), None) if self._sample is None else self._sample
        return EvaluateReport(loss=totals.mean_loss, tokens=totals.count, outputs=output)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of this rank's `loader`, then None until the loaders of all ranks have ended: loops over it end
        together. Each turn is collective."""
        return together(loader, self._mesh.everyone, self.device)

    @contextmanager
    def gathered(self, *, write: bool = False) -> Iterator[nn.Module]:
        """The model as plain torch with whole weights, e.g. to generate. Entering is collective, leaving is not.

        To be read: `UsageError` on leaving if a parameter was written to. With `write` it is kept, as rank 0 wrote it,
        and leaving is collective too. (What is written through `.data` nobody sees.)"""
        with self._access.gathered(write=write), self._evaluating(), torch.no_grad():
            yield self.model

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole tensors under the user's own names, ties and persistent buffers too, in the dtypes that the model
        was made with; trained ones from the master weights. On every rank. Collective."""
        return self._access.state()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> tuple[list[str], list[str]]:
        """Whole tensors under the model's own names become its weights and buffers; rank 0's are everyone's. The
        optimizer's state stays. -> names missing in `state`, and names the model lacks. Collective.

        Raises `UsageError`, with nothing written, for other shapes, and if `strict` for other names."""
        return self._access.load(state, strict=strict)

    def grad_of(self, name: str, part: Index = None) -> Tensor:
        """The whole gradient of the last step's mean loss with respect to parameter `name`, fp32 and before
        clipping, or a `part` of it: an index such as `slice(2, 5)`. On every rank. Collective."""
        if self._last is None and self._access.info(name).trainable:
            raise UsageError(f"there is no gradient of {name} yet", hint="Call engine.step(batch) first.")
        return self._access.gradient_of(name, part).div_(self._last.divisor if self._last else 1.0)

    def weight_of(self, name: str, part: Index = None) -> Tensor:
        """The whole value of parameter `name`, or a `part` of it: fp32 master weights, or what it is where it is
        frozen. On every rank. Collective."""
        return self._access.weight_of(name, part)

    def set_weight(self, name: str, value: Tensor, part: Index = None) -> None:
        """Parameter `name`, or a `part` of it, becomes rank 0's `value`, of exactly that shape: master weights and what
        the model computes with; its optimizer state stays. Collective."""
        self._access.set_weight(name, value, part)

    def edit(self, change: Callable[[nn.Module], Any]) -> None:
        """Calls `change(model)` on the whole model as plain torch: it may replace, add and remove modules, freeze and
        unfreeze parameters, alike on every rank. Collective.

        Parameters whose name and shape stay keep master weights and optimizer state; others begin anew with the values
        they get on rank 0. For so long every rank holds all weights and optimizer state. If `change` raises, the engine
        is closed. (After `requires_grad_` alone no edit is needed: the next step sees it and makes one.)"""
        self._refuse_closed()
        if self._mesh.layout.pp > 1:
            raise UsageError(
                "engine.edit, and with it freezing and unfreezing, is not there for a model in stages",
                hint="Make the change before the engine is made, or use parallel.pp = 1.",
            )
        self._access.close()
        self._closed = True
        self._take(edit(self._parts, self._mesh.sharding, change, self._assemble))
        self._closed = False

    def check_replicas(self) -> None:
        """Raises `DivergedError`, which names a parameter and ranks, where tensor-parallel ranks no longer have the
        same bits in master weights that they should hold alike. Collective. See also `run.check_every`."""
        check_replicas(self._parts.infos, self._parts.replica.shards, self._mesh)

    def dtype_plan(self) -> list[tuple[str, str]]:
        """(what, dtype) of weights, master weights, gradients, what travels and optimizer state, as they are now."""
        return census.dtypes(self._parts)

    def held_bytes(self) -> dict[str, list[int]]:
        """kind -> bytes on each rank. Activations: of one micro-batch, after its forward. Collective."""
        mine = census.held(self._parts)
        with self._evaluating(train=True):
            mine["activations"] = census.activations(self._parts, self._sample)
        return self._everyones(mine)

    def sent_bytes(self) -> dict[str, list[int]]:
        """axis -> bytes that each rank sent in steps, the mean per step; evaluation does not count. Collective."""
        steps = max(self._steps, 1)
        mine = {name: self._sent[name] // steps for name, axis in self._mesh.axes.items() if axis.size > 1}
        return self._everyones(mine)

    def trace(self, spans: Sequence[Span]) -> Trace:
        """What all ranks recorded of their steps, by one clock. On every rank. Collective."""
        self._parts.replica.settle()  # Jobs of the last step may be under way.
        return collect(spans, self._mesh.layout, self._mesh.everyone, self.device)

    def close(self) -> None:
        """Ends the engine's training: all hooks leave the model. Not collective, so weights stay where they are: whole
        and plain at levels 0 to 2; released at level 3, to be read as before. Ranks stay together until their
        processes end."""
        self._closed = True
        self._access.close(in_parts=self._mesh.model.size > 1)
        self._parts.close()

    def _take(self, parts: Parts) -> None:
        """From now on these parts train."""
        self._parts = parts
        axes = (self._mesh.model, parts.axis)
        self._access = Access(
            parts.model, parts.infos, parts.replica, axes, parts.tensor, parts.pipeline.placed, parts.optimizer.fetch
        )
        self._last = None
        self._parameters = [parts.model.get_parameter(info.name) for info in parts.infos]
        self.model: nn.Module = parts.model

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed", hint="Make a new one; several in one process are fine.")

    def _turns(self, batch: Batch) -> list[Batch | Padding]:
        """This rank's micro-batches, and padding where another rank has more. Collective."""
        self._refuse_closed()
        own_batches = split(batch, self.config.parallel.micro_batch, self.device)
        flags = training_flags(self._parameters)
        if self._steps < CHECKED_STEPS:
            refuse_other_data(batch, self._mesh.everyone, self._mesh.layout.model_groups(), self.device)
        mine = Mine(micro_batches=own_batches, seen=self._sample, trained=zlib.crc32(flags))
        micro_batches = even_out(mine, self._parts.axis, self.device)
        self._parts.pipeline.agree(next(iter(own(micro_batches)), micro_batches[0]))
        if flags != bytes(info.trainable for info in self._parts.infos):
            self.edit(lambda model: None)
        rounds = any(shard.gradient.dtype != torch.float32 for shard in self._parts.replica.shards)
        if len(micro_batches) > 1 and rounds and self.config.precision.gradients == "compute":
            raise ConfigError(
                f'precision.gradients = "compute" would round the sum of {len(micro_batches)} micro-batches each time',
                hint='Use "fp32", or ask for it by name with "compute-lossy".',
            )
        return micro_batches

    def _check(self, done: Done, micro_batches: list[Batch]) -> None:
        if not done.totals.same_calls:
            raise diverged(self._parts.axis, self.device, f"in step {self._steps + 1}")
        if done.totals.finite or (self._parts.scaler.enabled and self._parts.scaler.bad_steps < MOST_SKIPS):
            return
        rows = first_non_finite(self._parts, micro_batches, self._steps)
        skips = f" in {self._parts.scaler.bad_steps} steps in a row" if self._parts.scaler.enabled else ""
        found = "; ".join(rows) or "every rank's own are, their sum is not"
        raise NonFiniteError(
            f"loss or gradients are not finite{skips} (step {self._steps}): {found}",
            hint="The weights are those before this step. Look at that module's input, or lower the learning rate.",
        )

    @contextmanager
    def _evaluating(self, *, train: bool = False) -> Iterator[None]:
        """All modules in evaluation mode (or training mode), each as it was afterwards."""
        flags = [(module, module.training) for module in self.model.modules()]
        self.model.train(train)
        try:
            yield
        finally:
            for module, flag in flags:
                module.training = flag

    def _everyones(self, mine: Mapping[str, int]) -> dict[str, list[int]]:
        everyone = self._mesh.everyone
        numbers = torch.zeros(everyone.size, len(mine), dtype=torch.int64, device=self.device)
        numbers[everyone.index] = torch.tensor(list(mine.values()), device=self.device)
        everyone.all_reduce(numbers.view(-1), "report").wait()
        return dict(zip(mine, numbers.t().tolist()))


def _refuse_unheard(config: Config, optimizer: object) -> None:
    """Settings that the user's own optimizer function would not hear of."""
    choices = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
    for one in choices:
        if one is not None and not isinstance(one, str) and not callable(one):
            raise UsageError(
                f"the optimizer is a {type(one).__name__}",
                hint="Give a function of parameters, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1).",
            )
    if any(one is None or isinstance(one, str) for one in choices):
        return
    set_here = config.model_fields_set & {"optimizer"} and config.optimizer.model_fields_set
    unheard = sorted(set_here & {"name", "lr", "betas", "eps", "weight_decay", "no_decay"}) if set_here else []
    if unheard:
        raise ConfigError(
            f"optimizer.{unheard[0]} is set, and the optimizer is a function that makes its own settings",
            hint="Set it in one place: in the function, or in the configuration with optimizer = None.",
        )
