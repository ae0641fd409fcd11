"""`transformers.Trainer` with its model sharded by zero3d.

    trainer = Zero3dTrainer(model, args, train_dataset=data, zero3d={"zero": {"level": 3}})
    trainer.train()

The Trainer keeps its loop, its data, schedules, callbacks, logs, evaluation and checkpoint folders. The micro-batches
of a step are collected as it hands them out, and become one step of a `zero3d.Engine` when it has handed out the last.
"""

import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from zero3d.blueprint import Source
from zero3d.contracts import ModelSource
from zero3d.engine import Engine
from zero3d.errors import UsageError
from zero3d.integrations.arguments import Given, config_for, refuse_arguments
from zero3d.integrations.checkpoints import INSIDE, newest_whole, require_ours
from zero3d.integrations.optimizer import DrivenOptimizer, factories_of
from zero3d.integrations.world import refuse_world
from zero3d.pipeline.calling import MicroBatches
from zero3d.precision import dtypes_for
from zero3d.reports import StepReport

WEIGHTS = "model*.safetensors*"
"""Weights, in one file or in several with their index."""

HOOKS = ("_wrap_model", "_clip_grad_norm", "_get_grad_norm", "_save_optimizer_and_scheduler", "_load_from_checkpoint")
"""Methods of Trainer that are taken over: where one is not there, it would do something else."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One micro-batch: what the model is called with, the targets in the global batch (None: not counted), what its
    loss is divided by, and how many micro-batches this rank's step has."""

    inputs: dict[str, Any]
    num_items: Tensor | int | None
    divisor: int
    num_turns: int = 1


class Driven(nn.Module):
    """What the Trainer's loop holds as its wrapped model, so that nobody wraps it in anything else.

    forget: called where the loop asks for gradients to be zero
    """

    def __init__(self, model: nn.Module, forget: Callable[[], None]) -> None:
        super().__init__()
        self.module = model
        self._forget = forget

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Each step begins anew; a window that was never finished is no part of the next one."""
        self._forget()


class Zero3dTrainer(Trainer):
    """A `transformers.Trainer` that trains on sharded weights, gradients and optimizer state.

    model: as a Trainer takes it; or, so that no rank holds the whole model, a function that builds one (weights are
        drawn from the seed), or what `zero3d.pretrained` gives
    zero3d: sections of a configuration ([parallel], [zero], [offload], [precision], [recompute]) as a dict, or the
        path of a TOML file of them; left out, ZeRO level 2

    Everything else is the Trainer's own. For Seq2SeqTrainer and other subclasses of it:
    `class Mine(Zero3dTrainer, Seq2SeqTrainer): ...`. Every rank must make the same calls: `save_model` too.
    Raises `ConfigError` or `UsageError` for what cannot be honoured, before anything is trained.
    """

    def __init__(
        self,
        model: ModelSource | None = None,
        args: TrainingArguments | None = None,
        *others: Any,
        zero3d: Given | None = None,
        **options: Any,
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        missing = [name for name in HOOKS if not hasattr(Trainer, name)]
        if missing:
            raise UsageError(
                f"this version of Transformers has a Trainer without {missing[0]}, which Zero3dTrainer builds upon",
                hint="Install one that it knows: pip install 'zero3d[hf]'.",
            )
        refuse_arguments(args)
        refuse_world(args.world_size, args.device, "use_cpu=True")
        self._config = config_for({} if zero3d is None else zero3d, args)
        self.engine: Engine | None = None
        self._driven: Driven | None = None
        self._turns: list[Turn] = []
        self._report: StepReport | None = None
        source: Callable[[], nn.Module] | None = None
        if callable(model) and not isinstance(model, nn.Module):
            source, model = model, _skeleton(model)
        super().__init__(model, args, *others, **options)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UsageError(
                "Accelerate was told to use DeepSpeed or FSDP, and zero3d shards the model",
                hint="Start with torchrun, or with an Accelerate configuration that has neither.",
            )
        if source is not None:
            self._open(source)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`. True resumes from the newest checkpoint that is whole, on any number of ranks and at any
        level."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_whole(self.args.output_dir or "."))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Keeps a micro-batch; of a step's last one makes the whole step. -> the step's loss there, zero before."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            divides = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = divides or self.compute_loss_func is not None
        divisor = 1 if scaled else self.current_gradient_accumulation_steps
        prepared = dict(self._prepare_inputs(inputs))
        self._turns.append(Turn(inputs=prepared, num_items=num_items_in_batch, divisor=divisor))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        engine, optimizer = self._opened()
        batch = MicroBatches(replace(turn, num_turns=len(self._turns)) for turn in self._turns)
        self._forget_turns()
        self._report = engine.step(batch, lr=optimizer.factor())
        optimizer.step_was_skipped = self._report.skipped
        every = self.args.torch_empty_cache_steps
        if every and self.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return torch.tensor(self._report.loss, device=self.args.device)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(self._whole_model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. Where it generates, ranks stop at different lengths: weights are whole for so long."""
        self._wrap_model(self._whole_model, training=False)
        whole: AbstractContextManager[Any] = nullcontext()
        if getattr(self.args, "predict_with_generate", False):
            whole = self._opened()[0].gathered()
        with whole:
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model for `from_pretrained`, tensor by tensor: no rank holds all of it. Collective."""
        if self.engine is None or self.engine.model is not self.model:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir or ".")
        if hasattr(self.model, "peft_config"):
            self._save(str(folder), state_dict=self.engine.full_state_dict())
        else:
            self._export(self.engine, folder)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=getattr(self.args, "hub_revision", None))

    def _export(self, engine: Engine, folder: Path) -> None:
        """The Trainer writes what goes beside the weights, zero3d the weights."""
        beside = folder / "weights-under-way"
        if self.args.should_save:
            shutil.rmtree(beside, ignore_errors=True)
        engine.export(beside)
        if self.args.should_save:
            self._save(str(folder), state_dict={})
            for path in folder.glob(WEIGHTS):
                path.unlink()
            for path in beside.glob(WEIGHTS):
                path.replace(folder / path.name)
            shutil.rmtree(beside)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The model is sharded here, once the Trainer has its optimizer, and before anything else is done to it."""
        if self.engine is None or self.engine.model is not self.model:
            self._open(self._whole_model)
        if not isinstance(self.optimizer, DrivenOptimizer):
            raise UsageError(
                f"create_optimizer made a new {type(self.optimizer).__name__} for a model that is sharded already",
                hint="Let it return self.optimizer where that is not None.",
            )
        assert self._driven is not None
        return self._driven

    def _open(self, source: ModelSource) -> None:
        if self.optimizer is None:
            self.create_optimizer()
        optimizer, model = self.optimizer, self._whole_model
        assert optimizer is not None, "by create_optimizer"
        if self.engine is not None:
            self.engine.close()
        engine = Engine(source, _sum, factories_of(optimizer, model), self._config, call=self._loss_of)
        config: Any = getattr(engine.model, "config", None)
        if config is not None:
            config.use_cache = getattr(self.args, "use_cache", False)
        self.engine, self.optimizer = engine, DrivenOptimizer(optimizer)
        self.model = engine.model
        self.model_wrapped = self._driven = Driven(engine.model, self._forget_turns)
        if engine.notice and engine.rank == 0:
            warnings.warn(engine.notice, stacklevel=2)
        self.callback_handler.model, self.callback_handler.optimizer = self.model, self.optimizer

    @property
    def _whole_model(self) -> nn.Module:
        """The model itself, which nothing is wrapped round."""
        assert isinstance(self.model, nn.Module)
        return self.model

    def _opened(self) -> tuple[Engine, DrivenOptimizer]:
        assert self.engine is not None and isinstance(self.optimizer, DrivenOptimizer), "made by _wrap_model"
        return self.engine, self.optimizer

    def _forget_turns(self) -> None:
        self._turns = []

    def _loss_of(self, model: nn.Module, turn: Turn) -> Tensor:
        """The loss that the Trainer would call backward on."""
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, dict(turn.inputs), num_items_in_batch=turn.num_items)
        assert isinstance(loss, Tensor)
        return loss / turn.divisor

    def _prepare_inputs(self, inputs: dict[str, Any]) -> Any:
        prepared = super()._prepare_inputs(inputs)
        dtype = dtypes_for(self.engine.config).compute_rule if self.engine is not None else None
        if dtype is None:
            return prepared
        floats = [key for key, value in prepared.items() if isinstance(value, Tensor) and value.is_floating_point()]
        return {**prepared, **{key: prepared[key].to(dtype) for key in floats if key not in self.label_names}}

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """The step has clipped already."""
        return torch.tensor(self._get_grad_norm(model))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        assert self._report is not None
        return self._report.grad_norm

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """zero3d does, shard by shard."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._opened()[0].save(Path(output_dir) / INSIDE)
        super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        """The loss scale is in zero3d's checkpoint."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Only looks: weights come with the optimizer's state, once both are sharded."""
        require_ours(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._opened()[0].load(require_ours(checkpoint))
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """It came with zero3d's checkpoint."""

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None
        self._opened()[0].load(require_ours(best))


def _sum(loss: Tensor, turn: Turn) -> tuple[Tensor, int]:
    """Losses of a rank's micro-batches add up, and those of ranks are averaged: an average over micro-batches of
    `num_turns` times each."""
    return loss * turn.num_turns, 1


def _skeleton(source: Callable[[], nn.Module]) -> nn.Module:
    """The model without values, for the Trainer to look at."""
    with torch.device("meta"):
        return source.build() if isinstance(source, Source) else source()
