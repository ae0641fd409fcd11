"""Engine: a model, a loss and an optimizer that train as a configuration says."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero3d import census
from zero3d.assemble import Parts, assemble
from zero3d.comm.mesh import open_mesh, ranks_started
from zero3d.config import Config
from zero3d.contracts import Batch, Loss, ModelSource, OptimizerFactory
from zero3d.errors import ConfigError, DivergedError, NonFiniteError, UsageError
from zero3d.layout import Layout
from zero3d.optim.learning_rate import factor
from zero3d.params import ParamInfo
from zero3d.pipeline.calling import Call, split
from zero3d.precision import native_bf16
from zero3d.step import Done, evaluate_step, train_step
from zero3d.watch import first_non_finite

MOST_SKIPS = 10
"""fp16: so many steps in a row without finite gradients are no matter of the loss scale any more."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step, the same on every rank.

    loss: mean over the global batch's counted targets (NaN without any); tokens: their number; grad_norm: before
    clipping; clip_coefficient: what gradients were multiplied by; lr: of the first parameter group; skipped: nothing
    was updated (fp16 overflow, or no target counted); seconds: on this rank, from call to return; loss_scale: fp16's,
    else 1.
    """

    step: int
    loss: float
    tokens: int
    grad_norm: float
    clip_coefficient: float
    lr: float
    skipped: bool
    seconds: float
    loss_scale: float

    @property
    def grad_norm_after(self) -> float:
        """The norm after clipping."""
        return self.grad_norm * self.clip_coefficient


@dataclass(frozen=True, kw_only=True)
class EvaluateReport:
    """The mean loss over the counted targets of all ranks' batches (NaN without any), and their number."""

    loss: float
    tokens: int


class Engine:
    """Trains `model` over the ranks that were started, each of which makes an Engine with the same arguments.

    model: an nn.Module (any device; rank 0's weights are everyone's) or a function that builds one
    loss: loss(model_output, batch) -> (sum over counted targets, their number), or one mean tensor
    optimizer: a function parameters -> torch.optim.Optimizer that treats each element by itself; or a name.
        It is called once for every shard, with flat tensors. Left out: what the configuration names.
    config: a Config, a dict of sections, or the path of a TOML file
    call: call(model, batch) -> model_output, where batches are not what `pipeline.calling.caller` expects

    Raises `ConfigError` or `UsageError` for what cannot be honoured, before anything is trained.
    """

    def __init__(
        self,
        model: ModelSource,
        loss: Loss,
        optimizer: str | OptimizerFactory | None = None,
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
        self._mesh = open_mesh(layout, timedelta(seconds=self.config.run.timeout_seconds))
        optimizer = self.config.optimizer.name if optimizer is None else optimizer
        self._parts: Parts = assemble(model, loss, optimizer, self.config, self._mesh, call)
        self._steps = 0
        self._updates = 0
        self._closed = False
        self._sent: Counter[str] = Counter()
        self._last: Done | None = None
        self._sample: Batch = None
        self.model: nn.Module = self._parts.model

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
    def notice(self) -> str:
        """What the user should know about how the model was built; empty if nothing."""
        return self._parts.notice

    def step(self, batch: Batch) -> StepReport:
        """One update from this rank's part of the global batch. Collective.

        The batch is cut into micro-batches of `parallel.micro_batch` samples along the first dim of its tensors.
        Raises `NonFiniteError` when numbers went wrong for good; nothing has been updated then.
        """
        began = time.perf_counter()
        if not torch.is_grad_enabled():
            raise UsageError(
                "a step needs gradients, and they are switched off here",
                hint="Leave `with engine.gathered():` or `torch.no_grad()` first.",
            )
        micro_batches = self._split(batch)
        sent = {name: axis.sent_bytes for name, axis in self._mesh.axes.items()}
        self.model.train()
        steps = self.config.run.steps
        lr = factor(self._updates, steps, self.config.optimizer)
        done = train_step(self._parts, micro_batches, self._steps, lr)
        self._check(done, micro_batches)
        self._sent.update({name: axis.sent_bytes - sent[name] for name, axis in self._mesh.axes.items()})
        self._sample, self._last = micro_batches[0], done
        self._steps += 1
        self._updates += done.updated
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
        )

    def evaluate(self, batch: Batch) -> EvaluateReport:
        """The loss of `batch` without gradients or dropout; training flags are as before after it. Collective."""
        with self._evaluating():
            totals = evaluate_step(self._parts, self._split(batch))
        return EvaluateReport(loss=totals.mean_loss, tokens=totals.count)

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The model as plain torch with whole weights, e.g. to generate. Entering is collective, leaving is not.

        To be read: what is written to weights inside may be lost."""
        with self._parts.replica.gathered(), self._evaluating(), torch.no_grad():
            yield self.model

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole tensors under the user's own names, ties and persistent buffers too, in the dtypes that the model
        was made with; trained ones from the master weights. On every rank. Collective."""
        found = dict(self._parts.replica.whole(self._parts.infos))
        whole: dict[str, Tensor] = {}
        for info in self._parts.infos:
            tensor = found.get(info.name, torch.empty(0, device=self.device)).view(info.shape).to(info.dtype)
            whole.update((name, tensor) for name in (info.name, *info.ties))
        with self._parts.replica.gathered():
            names = self.model.state_dict(keep_vars=True)
        return {
            name: whole[name] if name in whole else self._parts.replica.rank_0s(tensor, name)
            for name, tensor in names.items()
        }

    def grad_of(self, name: str) -> Tensor:
        """The whole gradient of the last step's mean loss with respect to parameter `name`, fp32 and before
        clipping. On every rank. Collective."""
        info = self._info(name)
        if not info.trainable:
            raise UsageError(f"parameter {name} is frozen and has no gradient")
        if self._last is None:
            raise UsageError(f"there is no gradient of {name} yet", hint="Call engine.step(batch) first.")
        return self._parts.replica.gradient_of(info).div_(self._last.divisor)

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

    def close(self) -> None:
        """Ends the engine's training; weights can still be read. Ranks stay together until their processes end."""
        self._closed = True
        self._parts.replica.close()

    def _split(self, batch: Batch) -> list[Batch]:
        if self._closed:
            raise UsageError("the engine is closed", hint="Make a new one; several in one process are fine.")
        micro_batches = split(batch, self.config.parallel.micro_batch, self.device)
        rounds = any(shard.gradient.dtype != torch.float32 for shard in self._parts.replica.shards)
        if len(micro_batches) > 1 and rounds and self.config.precision.gradients == "compute":
            raise ConfigError(
                f'precision.gradients = "compute" would round the sum of {len(micro_batches)} micro-batches each time',
                hint='Use "fp32", or ask for it by name with "compute-lossy".',
            )
        return micro_batches

    def _check(self, done: Done, micro_batches: list[Batch]) -> None:
        if not done.totals.same_calls:
            raise DivergedError(
                f"ranks ran different modules in step {self._steps}: their collective calls do not match",
                hint="At ZeRO level 3 every rank must run the same blocks. Nothing has been updated.",
            )
        if done.totals.finite or (self._parts.scaler.enabled and self._parts.scaler.bad_steps < MOST_SKIPS):
            return
        rows = first_non_finite(self._parts, micro_batches, self._steps)
        skips = f" in {self._parts.scaler.bad_steps} steps in a row" if self._parts.scaler.enabled else ""
        found = "; ".join(rows) or "every rank's own are, their sum is not"
        raise NonFiniteError(
            f"loss or gradients are not finite{skips} (step {self._steps}): {found}",
            hint="The weights are those before this step. Look at that module's input, or lower the learning rate.",
        )

    def _info(self, name: str) -> ParamInfo:
        for info in self._parts.infos:
            if name in (info.name, *info.ties):
                return info
        raise UsageError(f"the model has no parameter {name}", hint="Names are those of model.named_parameters().")

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
        size = self.dp_size
        numbers = torch.zeros(size, len(mine), dtype=torch.int64, device=self.device)
        numbers[self.dp_index] = torch.tensor(list(mine.values()), device=self.device)
        self._parts.axis.inner.all_reduce(numbers.view(-1), "report").wait()
        return dict(zip(mine, numbers.t().tolist()))


def _refuse_unheard(config: Config, optimizer: object) -> None:
    """Settings that the user's own optimizer function would not hear of."""
    if optimizer is None or isinstance(optimizer, str):
        return
    if not callable(optimizer):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__name__}",
            hint="Give a function of parameters, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1).",
        )
    set_here = config.model_fields_set & {"optimizer"} and config.optimizer.model_fields_set
    unheard = sorted(set_here & {"name", "lr", "betas", "eps", "weight_decay", "no_decay"}) if set_here else []
    if unheard:
        raise ConfigError(
            f"optimizer.{unheard[0]} is set, and the optimizer is a function that makes its own settings",
            hint="Set it in one place: in the function, or in the configuration with optimizer = None.",
        )
