"""A DeepSpeed configuration (JSON) as one of zero3d. Pure: a dict in, a dict out, and what became of each key.

Each of their keys ends in one of three lists: taken (with ours), left out (with the reason), or open: "auto" there is
filled in by a program that we do not run, so that our default stands until somebody sets the key.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zero3d.config import Config
from zero3d.errors import UsageError
from zero3d.moving.reading import Converted, Reading
from zero3d.moving.without_equal import NO_EQUAL, NO_NEED

DEVICES: Final = {"none": "device", "cpu": "host", "nvme": "disk"}
DTYPES: Final = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfp16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
ADAMS: Final = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam")
OF_TORCH: Final = ("adagrad", "adadelta", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
SCHEDULES: Final = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}


def read(path: Path) -> dict[str, Any]:
    """The file's values. UsageError: it cannot be read, or is no JSON object."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="Give the path of a JSON file.") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", hint="Give a DeepSpeed configuration, as it runs.") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{path} holds no JSON object", hint="A DeepSpeed configuration is {...} with its keys.")
    return tree


def convert(settings: Mapping[str, Any], *, dp: int | None = None) -> Converted:
    """`settings` as zero3d has them; `dp`: the ranks that share a batch, where they are known.

    UsageError: a value that DeepSpeed would not take either, or batch sizes that contradict each other.
    """
    reading = Reading(settings)
    _zero(reading, dp)
    _precision(reading)
    _optimizer(reading)
    _schedule(reading)
    _batches(reading, dp)
    _more(reading)
    reading.list_the_rest([(NO_NEED, False), (NO_EQUAL, True)])
    return reading.out


def _zero(reading: Reading, dp: int | None) -> None:
    here = "zero_optimization"
    level = reading.take_number(f"{here}.stage", "zero.level", int)
    if level is None and not reading.is_auto(f"{here}.stage"):
        level = 0
        reading.take(f"{here}.stage, which is not set", "zero.level", level)
    overlap = reading.get(f"{here}.overlap_comm")
    if overlap is not None:
        reading.take(f"{here}.overlap_comm", "zero.overlap", bool(overlap))
    shard = reading.number(f"{here}.mics_shard_size", int)
    if shard is not None and shard > 0:
        if dp is not None and dp % shard == 0:
            reading.take(f"{here}.mics_shard_size", "zero.replicas", dp // shard)
        else:
            reading.leave_open(f"{here}.mics_shard_size", "zero.replicas", f"set it to dp / {shard}; -n says dp")
    _homes(reading, level)


def _homes(reading: Reading, level: int | None) -> None:
    here = "zero_optimization"
    homes = {}
    for part, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_params")):
        path = f"{here}.{part}.device"
        device = reading.get(path) or ("cpu" if reading.get(f"{here}.{old}") else "none")
        if device not in DEVICES:
            raise UsageError(f"{path} = {json.dumps(device)} is no device", hint=f"Devices: {', '.join(DEVICES)}.")
        homes[part] = DEVICES[str(device)]
    optimizer, weights = homes["offload_optimizer"], homes["offload_param"]
    folder = reading.get(f"{here}.offload_optimizer.nvme_path")
    reading.get(f"{here}.offload_param.nvme_path")
    if weights != "device" and level != 3:
        reading.leave_out(f"{here}.offload_param.device", "the weights leave the device at level 3 alone")
        weights = "device"
    if weights == "disk":
        reading.leave_out(f"{here}.offload_param.nvme_path", "shards of the weights are on the host, not on disk")
    if weights != "device":
        reading.take(f"{here}.offload_param.device", "offload.parameters", "host")
        if optimizer == "device":
            optimizer = "host"
            why = 'where weights are on the host the optimizer is too: offload.optimizer = "host"'
            reading.leave_open(f"{here}.offload_param.device", "offload.optimizer", why)
    if optimizer == "device":
        return
    reading.take(f"{here}.offload_optimizer.device", "offload.optimizer", optimizer)
    if optimizer == "disk":
        reading.take(f"{here}.offload_optimizer.nvme_path", "offload.folder", folder or "offload")
        if not folder:
            reading.leave_open(f"{here}.offload_optimizer.nvme_path", "offload.folder", "set it to a folder on a disk")
    ratio = reading.number(f"{here}.offload_optimizer.ratio", float)
    if ratio is not None and 0 < ratio < 1:
        reading.take(f"{here}.offload_optimizer.ratio", "offload.fraction", ratio)


def _precision(reading: Reading) -> None:
    autos = []
    compute = None
    for path, dtype in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if reading.is_auto(f"{path}.enabled"):
            autos.append(f"{path}.enabled")
        if reading.get(f"{path}.enabled"):
            if compute not in (None, dtype):
                raise UsageError("bf16 and fp16 are both enabled", hint="Leave one of them out.")
            compute = dtype
            reading.take(f"{path}.enabled", "precision.compute", dtype)
    if compute is None and autos:
        reading.leave_open(", ".join(autos), "precision.compute")
    elif compute is None:
        reading.take("neither bf16 nor fp16", "precision.compute", "fp32")
    if reading.number("fp16.loss_scale", float) and compute == "fp16":  # 0 is dynamic, as here.
        reading.leave_out("fp16.loss_scale", NO_EQUAL["fp16.loss_scale"])
    for theirs, ours in (
        ("communication_data_type", "precision.reduce"),
        ("data_types.grad_accum_dtype", "precision.gradients"),
    ):
        given = reading.get(theirs)
        if given is None:
            continue
        if given not in DTYPES:
            raise UsageError(f"{theirs} = {json.dumps(given)} is no dtype", hint=f"Dtypes: {', '.join(DTYPES)}.")
        dtype = DTYPES[given]
        if ours == "precision.gradients" and dtype not in ("fp32", compute):
            reading.leave_out(theirs, "held gradients are in fp32, or in the dtype of the weights")
        else:
            lossy = ours == "precision.gradients" and dtype != "fp32"
            reading.take(theirs, ours, "compute-lossy" if lossy else dtype)


def _optimizer(reading: Reading) -> None:
    kind = reading.get("optimizer.type")
    if kind is None:
        if not reading.has("optimizer"):
            reading.leave_open("optimizer, which is not set", "optimizer.name", "made by the program: set [optimizer]")
            return
        kind = "AdamW"
    name = str(kind).lower()
    w_mode = reading.get("optimizer.params.adam_w_mode", True)
    if name in ADAMS:
        reading.take("optimizer.type", "optimizer.name", "adamw" if w_mode else "adam")
    elif name in OF_TORCH:
        reading.take("optimizer.type", "optimizer.name", name)
    else:
        reading.leave_out("optimizer.type", f"{kind} is not in torch.optim; optimizer.name stays adamw")
    for theirs in ("lr", "eps", "weight_decay"):
        reading.take_number(f"optimizer.params.{theirs}", f"optimizer.{theirs}", float)
    betas = reading.get("optimizer.params.betas")
    if betas is not None:
        reading.take("optimizer.params.betas", "optimizer.betas", betas)
    elif reading.is_auto("optimizer.params.betas"):
        reading.leave_open("optimizer.params.betas", "optimizer.betas")
    elif name in ADAMS:
        reading.take("optimizer.params.betas, which is not set", "optimizer.betas", [0.9, 0.999])
    if not reading.has("optimizer.params.weight_decay"):
        reading.take("optimizer.params.weight_decay, which is not set", "optimizer.weight_decay", 0.0)
    if reading.out.tree.get("optimizer", {}).get("weight_decay"):
        why = "vectors are not decayed here; set it to [] to decay all that the optimizer is given, as DeepSpeed does"
        reading.leave_open("optimizer.params.weight_decay", "optimizer.no_decay", why)
    for theirs in ("torch_adam", "bias_correction", "fused"):
        if reading.has(f"optimizer.params.{theirs}"):
            reading.leave_out(f"optimizer.params.{theirs}", "the update is as in torch.optim", needed=False)
    for theirs in reading.below("optimizer.params"):
        reading.leave_out(theirs, "[optimizer] has no such key; from Python pass a function that makes the optimizer")


def _schedule(reading: Reading) -> None:
    here = "scheduler.params"
    kind = reading.get("scheduler.type")
    if kind is None:
        return
    schedule = SCHEDULES.get(str(kind).lower())
    if schedule is None:
        reading.leave_out("scheduler.type", f"{kind}: schedules are constant, linear and cosine")
        for theirs in reading.below(here):
            reading.leave_out(theirs, f"belongs to {kind}")
        return
    reading.take("scheduler.type", "optimizer.schedule", schedule)
    warmup = reading.take_number(f"{here}.warmup_num_steps", "optimizer.warmup", int) or 0
    steps = reading.take_number(f"{here}.total_num_steps", "run.steps", int)
    peak = reading.number(f"{here}.warmup_max_lr", float)
    if peak is not None:
        reading.take(f"{here}.warmup_max_lr", "optimizer.lr", peak)
    elif reading.is_auto(f"{here}.warmup_max_lr") and "lr" not in reading.out.tree.get("optimizer", {}):
        reading.leave_open(f"{here}.warmup_max_lr", "optimizer.lr")
    reading.take_number(f"{here}.cos_min_ratio", "optimizer.final_lr", float)
    if reading.number(f"{here}.warmup_min_lr", float):
        reading.leave_out(f"{here}.warmup_min_lr", "warm-up begins at 0")
    if reading.number(f"{here}.warmup_min_ratio", float):
        reading.leave_out(f"{here}.warmup_min_ratio", "warm-up begins at 0")
    if reading.get(f"{here}.warmup_type", "log") != "linear" and warmup:
        reading.leave_out(f"{here}.warmup_type", "warm-up is linear; DeepSpeed's is logarithmic unless told otherwise")
    if steps is None and warmup > Config().run.steps:
        reading.take("a guess, ten times the warm-up", "run.steps", 10 * warmup)
        reading.leave_open("the number of steps, which is not in the file", "run.steps", "a guess stands there")


def _batches(reading: Reading, dp: int | None) -> None:
    """Three numbers for two facts: what contradicts itself is refused."""
    batch = reading.number("train_batch_size", int)
    micro = reading.number("train_micro_batch_size_per_gpu", int)
    rounds = reading.number("gradient_accumulation_steps", int)
    if batch is not None and micro is not None and (rounds is not None or dp is not None):
        each = micro * (rounds or 1) * (dp or 1)
        if batch % each or (rounds is not None and dp is not None and batch != each):
            shown = " x ".join(f"{one}" for one in (micro, rounds, dp) if one is not None)
            raise UsageError(
                f"train_batch_size = {batch} is not {shown} (train_micro_batch_size_per_gpu"
                f"{' x gradient_accumulation_steps' if rounds is not None else ''}{' x dp' if dp is not None else ''})",
                hint=f"Leave gradient_accumulation_steps out, or set train_batch_size to {each}.",
            )
    if batch is None and micro is not None and dp is not None:
        batch = micro * (rounds or 1) * dp
        reading.take(f"micro-batch {micro} x accumulation {rounds or 1} x {dp} ranks", "data.global_batch", batch)
    elif batch is not None:
        reading.take("train_batch_size", "data.global_batch", batch)
    else:
        why = "train_batch_size is not in the file; it is micro-batch x accumulation x dp, and -n says dp"
        reading.leave_open("train_batch_size", "data.global_batch", why)
    if batch is not None and dp is None and micro and rounds:
        dp = batch // (micro * rounds)
        reading.take(f"batch {batch} / micro-batch {micro} / accumulation {rounds}", "parallel.dp", dp)
    elif dp is not None:
        reading.take("-n", "parallel.dp", dp)
    if micro is None and batch is not None and rounds and dp and batch % (rounds * dp) == 0:
        reading.take(
            f"batch {batch} / accumulation {rounds} / {dp} ranks", "parallel.micro_batch", batch // rounds // dp
        )
    elif micro is not None:
        reading.take("train_micro_batch_size_per_gpu", "parallel.micro_batch", micro)
    elif reading.is_auto("train_micro_batch_size_per_gpu") or rounds:
        why = "left out, it is a rank's whole part of the batch"
        reading.leave_open("train_micro_batch_size_per_gpu", "parallel.micro_batch", why)


def _more(reading: Reading) -> None:
    if reading.take_number("gradient_clipping", "optimizer.clip_norm", float) is None:
        why = "not in the file; versions of DeepSpeed differ in whether they clip at 1.0 then, and zero3d does not"
        if not reading.is_auto("gradient_clipping"):
            reading.leave_open("gradient_clipping", "optimizer.clip_norm", why)
    if reading.has("activation_checkpointing"):
        reading.take("activation_checkpointing", "recompute.mode", "block")
    reading.take_number("tensor_parallel.autotp_size", "parallel.tp", int)
    reading.take_number("pipeline.stages", "parallel.pp", int)
    printed = reading.number("steps_per_print", int)
    if printed is not None and printed >= 1:
        reading.take("steps_per_print", "run.log_every", printed)
    project = reading.get("wandb.project")
    if reading.get("wandb.enabled") and project:
        reading.take("wandb.project", "run.wandb", project)
    name = reading.get("tensorboard.job_name")
    if name:
        reading.take("tensorboard.job_name", "run.name", name)
