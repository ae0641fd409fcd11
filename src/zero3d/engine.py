"""Engine: a model, a loss and an optimizer that train as a configuration says."""

import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero3d import census
from zero3d.access import Access, Index
from zero3d.assemble import Parts, assemble
from zero3d.checkpoint.export import export
from zero3d.checkpoint.hub import KEPT_CONFIG, config_of
from zero3d.checkpoint.load import Loaded, load
from zero3d.checkpoint.manifest import What
from zero3d.checkpoint.place import Url
from zero3d.checkpoint.saves import Saves
from zero3d.comm.diverged import diverged
from zero3d.comm.mesh import open_mesh, ranks_started
from zero3d.comm.texts import everyones_numbers, everyones_text
from zero3d.config import Config
from zero3d.contracts import Batch, Loss, ModelSource, OptimizerChoice, Watcher
from zero3d.editing import edit, training_flags
from zero3d.errors import UsageError
from zero3d.layout import Layout
from zero3d.modes import in_mode
from zero3d.offload.budget import MachineNeed
from zero3d.optim.learning_rate import factor
from zero3d.optim.unheard import refuse_unheard
from zero3d.params import ParamInfo
from zero3d.pipeline.calling import Call, split
from zero3d.pipeline.cut import Stages
from zero3d.pipeline.same import CHECKED_STEPS, refuse_other_data
from zero3d.pipeline.uneven import Mine, Padding, even_out, own, together
from zero3d.precision import native_bf16, refuse_rounding
from zero3d.replicas import check_replicas
from zero3d.reports import EvaluateReport, StepReport
from zero3d.step import Done, evaluate_step, train_step
from zero3d.tensor.loss import whole_logits
from zero3d.trace.collect import collect
from zero3d.trace.span import Span, Trace
from zero3d.unwatched import UNWATCHED
from zero3d.watch import refuse_non_finite


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
    Then: `rank` of `world` ranks; `dp_index` of `dp_size`, whose part of a batch is this rank's; `device`, the model's.
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
        refuse_unheard(given, optimizer)
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
        self.aside = self._mesh.axes["dp"].aside
        """What ranks tell each other beside the numbers of each step and evaluation."""
        self._last: Done | None = None
        self._saves = Saves(self._mesh)
        self._take(self._assemble(model))
        self._steps = self._updates = 0
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
        """What the user should know about how the model was built and where ranks are; empty if nothing."""
        return self._parts.notice

    def everyones(self, mine: str, what: str) -> list[str]:
        """The texts of all ranks, by rank; `what` they say, for errors. Collective."""
        return everyones_text(mine, self._mesh.everyone, self.device, what)

    @property
    def host_memory(self) -> str:
        """What the ranks of each machine take of its memory; empty without offload."""
        return self._parts.homes.notice

    @property
    def host_needs(self) -> Sequence[MachineNeed]:
        """The same as numbers, one for each machine."""
        return self._parts.homes.machines

    def step(self, batch: Batch, watcher: Watcher = UNWATCHED, *, lr: float | None = None) -> StepReport:
        """One update from this rank's part of the global batch. Collective. None, or no samples: nothing this time.

        The batch is cut into micro-batches of `parallel.micro_batch` samples along the first dim of its tensors.
        Ranks may differ in their number. watcher: is told what this rank does, and when. lr: for the schedule's factor.
        Raises `NonFiniteError` when numbers went wrong for good, `UsageError` under no_grad; nothing is updated then.
        """
        began = time.perf_counter()
        if not torch.is_grad_enabled():
            raise UsageError(
                "a step needs gradients, and they are switched off here",
                hint="Leave `with engine.gathered():` or `torch.no_grad()` first.",
            )
        self._saves.poll()
        self._mesh.enter_step(self._steps + 1)
        self._mesh.watch(watcher)
        self._parts.homes.watch(watcher)
        micro_batches = self._turns(batch)
        sent = {name: axis.sent_bytes for name, axis in self._mesh.axes.items()}
        if not self.model.training:  # Single modules may be in evaluation mode on purpose.
            self.model.train()
        lr = factor(self._updates, self.config.run.steps, self.config.optimizer) if lr is None else lr
        done = train_step(self._parts, micro_batches, self._steps, lr, watcher)
        self._check(done, micro_batches)
        self._mesh.enter_step(0)
        sent = {name: axis.sent_bytes - sent[name] for name, axis in self._mesh.axes.items()}
        self._sent.update(sent)
        self._sample, self._last = next(iter(own(micro_batches)), self._sample), done
        self._steps, self._updates = self._steps + 1, self._updates + done.updated
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
            sent=sent,
        )

    def evaluate(self, batch: Batch, *, outputs: bool = False) -> EvaluateReport:
        """The loss of `batch`, which may be None, without gradients or dropout; training flags are as before after it.
        Collective.

        outputs: also what the model gives, in the order of samples, on every rank that shares the replica (with
        pipeline stages as plain dicts, lists and tuples of tensors)"""
        micro_batches = self._turns(batch)
        found: list[Any] | None = [] if outputs else None
        with in_mode(self.model, train=False):
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
        if write:
            self._be_up_to_date()
        refusing = self._saves.refusing(write)
        with refusing, self._access.gathered(write=write), in_mode(self.model, train=False), torch.no_grad():
            yield self.model

    def save(
        self,
        folder: str | Path | Url,
        *,
        what: What = "all",
        extra: Mapping[str, Any] | None = None,
        background: bool = False,
    ) -> Path | Url:
        """Saves a checkpoint of the steps made so far in `folder`, which all ranks reach: a path, or a URL such as
        s3://bucket/run. -> its own folder there. Collective.

        what: "all"; "weights" and buffers alone; what is "trainable", its optimizer state, and buffers. extra: what
        else `load` is to give back, of JSON's types. background: files are written while training goes on, and the
        checkpoint is whole after one of the next steps, the next save or `finish_saving`, which raise what went wrong.
        Raises `UsageError`, `OutOfSpaceError` or `DivergedError` on all ranks; what was saved before is unharmed."""
        self._refuse_closed()
        self._be_up_to_date()
        kept = {"updates": self._updates, "own": extra or {}, KEPT_CONFIG: config_of(self.model)}
        config = self.config.model_dump(mode="json")
        return self._saves.begin(
            self._parts, folder, background, step=self._steps, extra=kept, config=config, what=what
        )

    def finish_saving(self) -> None:
        """Waits for a save in the background. Collective."""
        self._saves.wait()

    def load(self, folder: str | Path | Url, *, allow_missing: bool = False) -> Loaded:
        """Weights, optimizer state, buffers, loss scale and steps become those of the newest whole checkpoint in
        `folder` (a path or a URL), or of the one that it is, whatever layout saved it. Collective.

        allow_missing: what the checkpoint lacks stays as it is. Raises `DataError` where there is no whole checkpoint,
        `UsageError`, with nothing written, where it is another model's."""
        self._refuse_closed()
        self._saves.wait("engine.load")
        loaded = load(self._parts, self._mesh, folder, allow_missing=allow_missing)
        self._steps, self._updates = loaded.step, int(loaded.extra.get("updates", loaded.step))
        self._parts.optimizer.go_on_from(self._updates)
        self._last = None
        return replace(loaded, extra=loaded.extra.get("own", {}))

    def export(self, folder: str | Path) -> Path:
        """The model's weights, as they are now, as safetensors that Transformers loads: its own names, shapes and
        dtypes, ties left out, config.json where it has one. `folder` must be new or empty. -> it. Collective."""
        self._be_up_to_date("engine.export")
        return export(self._parts, self._mesh, folder).folder

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole tensors under the user's own names, ties and persistent buffers too, in the dtypes that the model
        was made with; trained ones from the master weights. On every rank. Collective."""
        return self._access.state()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> tuple[list[str], list[str]]:
        """Whole tensors under the model's own names become its weights and buffers; rank 0's are everyone's. The
        optimizer's state stays. -> names missing in `state`, and names the model lacks. Collective.

        Raises `UsageError`, with nothing written, for other shapes, and if `strict` for other names."""
        self._be_up_to_date()
        return self._access.load(state, strict=strict)

    def grad_of(self, name: str, part: Index = None) -> Tensor:
        """The whole gradient of the last step's mean loss with respect to parameter `name`, fp32 and before
        clipping, or a `part` of it: an index such as `slice(2, 5)`. On every rank. Collective. `UsageError`: none."""
        if self._last is None and self._access.info(name).trainable:
            raise UsageError(f"there is no gradient of {name} yet", hint="Call engine.step(batch) first.")
        return self._access.gradient_of(name, part).div_(self._last.divisor if self._last else 1.0)

    def weight_of(self, name: str, part: Index = None) -> Tensor:
        """The whole value of parameter `name`, or a `part` of it: fp32 master weights, or what it is where it is
        frozen. On every rank. Collective. `UsageError`: no such parameter, or part."""
        return self._access.weight_of(name, part)

    def set_weight(self, name: str, value: Tensor, part: Index = None) -> None:
        """Parameter `name`, or a `part` of it, becomes rank 0's `value`, of exactly that shape: master weights and what
        the model computes with; its optimizer state stays. Collective. `UsageError`: no such one, another shape."""
        self._be_up_to_date()
        self._access.set_weight(name, value, part)

    def edit(self, change: Callable[[nn.Module], Any]) -> None:
        """Calls `change(model)` on the whole model as plain torch: it may replace, add and remove modules, freeze and
        unfreeze parameters, alike on every rank. Collective.

        Parameters whose name and shape stay keep master weights and optimizer state; others begin anew with the values
        they get on rank 0. For so long every rank holds all weights and optimizer state. If `change` raises, the engine
        is closed. (`requires_grad_` alone needs no edit: the next step makes one.) `UsageError`: in stages."""
        self._refuse_closed()
        if self._mesh.layout.pp > 1:
            raise UsageError(
                "engine.edit, and with it freezing and unfreezing, is not there for a model in stages",
                hint="Make the change before the engine is made, or use parallel.pp = 1.",
            )
        self._saves.wait()
        self._access.close()
        self._closed = True
        self._take(edit(self._parts, self._mesh.sharding, change, self._assemble))
        self._parts.optimizer.go_on_from(self._updates)
        self._closed = False

    def check_replicas(self) -> None:
        """Raises `DivergedError`, which names a parameter and ranks, where ranks of tp, or stages with tied weights,
        have other bits in master weights that they should hold alike. Collective. See also `run.check_every`."""
        check_replicas(self._parts.infos, self._parts.replica.shards, self._mesh, self._parts.shared)

    def dtype_plan(self) -> list[tuple[str, str]]:
        """(what, dtype) of weights, master weights, gradients, what travels and optimizer state, as they are now."""
        return census.dtypes(self._parts)

    def held_bytes(self) -> dict[str, list[int]]:
        """kind -> bytes on each rank. Activations: of one micro-batch, after its forward. Collective."""
        mine = census.held(self._parts)
        with in_mode(self.model, train=True):
            mine["activations"] = census.activations(self._parts, self._sample)
        return everyones_numbers(mine, self._mesh.everyone, self.device, "report")

    def sent_bytes(self) -> dict[str, list[int]]:
        """axis -> bytes that each rank sent in steps, the mean per step; evaluation does not count. Collective."""
        steps = max(self._steps, 1)
        mine = {name: self._sent[name] // steps for name, axis in self._mesh.axes.items() if axis.size > 1}
        return everyones_numbers(mine, self._mesh.everyone, self.device, "report")

    def trace(self, spans: Sequence[Span]) -> Trace:
        """What all ranks recorded of their steps, by one clock. On every rank. Collective."""
        self._parts.replica.settle()  # Jobs of the last step may be under way.
        return collect(spans, self._mesh.layout, self._mesh.everyone, self.device)

    def close(self) -> None:
        """Ends the engine's training: all hooks leave the model, whose weights are whole and plain at levels 0 to 2,
        and released at level 3, to be read as before. Not collective, unless updates are on their way (`[offload]`)."""
        if self._saves.pending and not self._closed:
            warnings.warn("the last save is not whole: call engine.finish_saving() before engine.close()", stacklevel=2)
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
        parts.optimizer.ask_before_update(self._saves.before_update)
        self._last = None
        self._parameters = [parts.model.get_parameter(info.name) for info in parts.infos]
        self.model: nn.Module = parts.model

    def _be_up_to_date(self, call: str = "") -> None:
        """No save reads any more, and no update is late: weights may be kept, and written to. Collective."""
        self._saves.wait(call)
        if not self._closed:
            self._parts.replica.publish(self._parts.optimizer.flush())

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
        refuse_rounding(self.config, len(micro_batches), (one.gradient.dtype for one in self._parts.replica.shards))
        return micro_batches

    def _check(self, done: Done, micro_batches: list[Batch]) -> None:
        if not done.totals.same_calls:
            raise diverged(self._parts.axis, self.device, f"in step {self._steps + 1}")
        refuse_non_finite(self._parts, done.totals, micro_batches, self._steps)
