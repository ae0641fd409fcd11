"""Who says what: `TrainingArguments` the training, zero3d's sections how it is spread over ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from zero3d.config import Config
from zero3d.errors import ConfigError, UsageError

Given = Config | Mapping[str, Any] | str | Path
"""Sections of a configuration, or a TOML file of them."""

SECTIONS = ("parallel", "zero", "offload", "precision", "recompute")
"""Sections that a Trainer takes whole."""
KEYS = {"model": ("blocks",), "run": ("timeout_seconds", "check_every")}
"""Keys that it takes of others."""
INSTEAD = {
    "optimizer": "learning_rate, optim, weight_decay, max_grad_norm, lr_scheduler_type and warmup_steps",
    "data": "per_device_train_batch_size and gradient_accumulation_steps, with the Trainer's datasets",
    "checkpoint": "save_strategy, save_steps and save_total_limit",
    "model": "the Trainer's model",
    "run": "output_dir, seed, max_steps, num_train_epochs and logging_steps",
}
"""What says the same in TrainingArguments."""


def config_for(given: Given, args: TrainingArguments) -> Config:
    """zero3d's configuration of a training with these arguments.

    Raises `ConfigError` for keys that TrainingArguments say, or that a Trainer's loop cannot honour.
    """
    asked = Config.load(given)
    tree = asked.model_dump(exclude_unset=True)
    for section, keys in tree.items():
        for key in keys if section not in SECTIONS else ():
            if key not in KEYS.get(section, ()):
                raise ConfigError(
                    f"{section}.{key} is set, which is for TrainingArguments to say",
                    hint=f"Leave it out, and use {INSTEAD[section]}.",
                )
    parallel = asked.parallel
    if parallel.tp > 1 or parallel.pp > 1:
        raise ConfigError(
            f"parallel.tp = {parallel.tp} and parallel.pp = {parallel.pp}: a Trainer gives every rank other samples",
            hint="Use zero3d.Engine, or `zero3d train`, for tensor parallelism and pipeline stages.",
        )
    if parallel.micro_batch is not None:
        raise ConfigError(
            f"parallel.micro_batch = {parallel.micro_batch}: a Trainer's micro-batches are its own",
            hint="Use per_device_train_batch_size and gradient_accumulation_steps.",
        )
    tree["optimizer"] = {"clip_norm": float(args.max_grad_norm or 0.0)}
    tree["run"] = {**tree.get("run", {}), "seed": args.seed}
    half = [name for name in ("bf16", "fp16") if getattr(args, name)]
    if half:
        if "compute" in tree.get("precision", {}):
            raise ConfigError(
                f'{half[0]}=True and precision.compute = "{asked.precision.compute}" are both set',
                hint=f'Set one of them: {half[0]}=True means precision.compute = "{half[0]}" here.',
            )
        tree["precision"] = {**tree.get("precision", {}), "compute": half[0]}
    return Config.load(tree)


def refuse_arguments(args: TrainingArguments) -> None:
    """Raises `UsageError` for arguments that would do nothing, or something else, beside zero3d."""
    for wrong, what, hint in (
        (args.deepspeed, "deepspeed is set", "Leave it out: zero3d's `zero` and `offload` say the same."),
        (args.fsdp, "fsdp is set", "Leave it out: zero3d={'zero': {'level': 3}} shards parameters."),
        (
            getattr(args, "parallelism_config", None),
            "parallelism_config is set",
            "Leave it out, and let zero3d alone spread the model over ranks.",
        ),
        (args.torch_compile, "torch_compile is set", "Compile the blocks before: block.compile() for each of them."),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size is set, and ranks would run out of memory at different times",
            "Choose per_device_train_batch_size; `zero3d plan` says what fits.",
        ),
        (
            args.fp16_full_eval or args.bf16_full_eval,
            "weights are to be cast for evaluation (fp16_full_eval, bf16_full_eval)",
            "Leave it out: evaluation computes in precision.compute.",
        ),
        (
            args.save_only_model and args.load_best_model_at_end,
            "save_only_model and load_best_model_at_end are both set",
            "The best weights come from zero3d's checkpoint, which save_only_model leaves out: drop one of the two.",
        ),
        (
            args.save_on_each_node,
            "save_on_each_node is set",
            "Leave it out: checkpoints go to one folder, which all ranks must reach.",
        ),
        (
            not getattr(args.accelerator_config, "even_batches", True),
            "accelerator_config has even_batches=False, and ranks would come to different numbers of batches",
            "Leave it True, or set dataloader_drop_last=True.",
        ),
        (
            args.n_gpu > 1,
            f"one process would use {args.n_gpu} GPUs",
            f"Start one process a GPU: torchrun --nproc-per-node {args.n_gpu} ...",
        ),
    ):
        if wrong:
            raise UsageError(f"{what}, and Zero3dTrainer cannot honour that", hint=hint)
