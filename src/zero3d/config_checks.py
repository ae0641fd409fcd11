"""The checks across options. Each names the values that clash, and values that would work.

`problems` needs the configuration alone; `batch_problems` also the size of dp, once that is known.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from zero3d.config import Config, Model

PRESETS = ("gpt", "llama")
LEVELS = "Levels: 0 shards nothing over dp, 1 the optimizer state, 2 also gradients, 3 also parameters."


class Problem(NamedTuple):
    """The key to look at, what is wrong, and what to do."""

    key: str
    message: str
    hint: str


def problems(config: "Config") -> Iterator[Problem]:
    """Everything that can be known before the number of ranks is."""
    yield from _model_problems(config)
    yield from _step_problems(config)
    yield from _place_problems(config)
    if config.run.check_every and config.parallel.tp == config.parallel.pp == 1:
        yield Problem(
            "run.check_every",
            f"run.check_every = {config.run.check_every} at parallel.tp = 1 and pp = 1: nothing is there twice",
            "Leave it out, or set parallel.tp to 2 or more.",
        )
    if config.parallel.sequence_parallel and config.parallel.tp == 1:
        yield Problem(
            "parallel.sequence_parallel",
            "parallel.sequence_parallel = true at parallel.tp = 1, where nothing is cut",
            "Set parallel.tp to 2 or more, or leave parallel.sequence_parallel out.",
        )
    if config.parallel.sequence_parallel and config.data.sequence_length % config.parallel.tp:
        length, tp = config.data.sequence_length, config.parallel.tp
        yield Problem(
            "data.sequence_length",
            f"data.sequence_length = {length} does not divide over parallel.tp = {tp} ranks, over which "
            "parallel.sequence_parallel cuts it",
            f"Set data.sequence_length to {length - length % tp or tp}, or parallel.sequence_parallel = false.",
        )
    if config.zero.level not in (0, 1, 2, 3):
        yield Problem("zero.level", f"zero.level = {config.zero.level} is outside 0 to 3", LEVELS)
    elif config.zero.level == 0 and config.zero.replicas > 1:
        yield Problem(
            "zero.replicas",
            f"zero.replicas = {config.zero.replicas} at zero.level = 0, where nothing is sharded",
            "Set zero.replicas = 1, or zero.level to 1, 2 or 3.",
        )
    elif config.parallel.dp != "auto":
        yield from _replica_problems(config, config.parallel.dp)
    yield from _offload_problems(config)
    if config.parallel.dp != "auto":
        yield from _home_problems(config, config.parallel.dp)
    # Who calls the engine with batches of their own does not set a size here.
    if config.parallel.dp != "auto" and "global_batch" in config.data.model_fields_set:
        yield from batch_problems(config, config.parallel.dp)


def _model_problems(config: "Config") -> Iterator[Problem]:
    model = config.model
    if model.path is not None:
        if model.preset is not None:
            yield Problem(
                "model.path",
                f"model.preset = {model.preset!r} and model.path = {model.path!r} are both set",
                "Leave one of them out.",
            )
        if model.path.count(":") != 1:
            yield Problem(
                "model.path",
                f"model.path = {model.path!r} does not name a function",
                'Write it as "package.module:function".',
            )
    elif model.preset not in PRESETS:
        yield Problem(
            "model.preset",
            f"there is no preset {model.preset!r}",
            f"Presets: {', '.join(PRESETS)}. For your own model set model.path.",
        )
    else:
        yield from _preset_problems(model)


def _preset_problems(model: "Model") -> Iterator[Problem]:
    if model.width % (2 * model.heads):
        # Rotary positions turn features in pairs, so a head's width is even.
        fits = [heads for heads in range(1, model.width // 2 + 1) if model.width % (2 * heads) == 0]
        near = [one for one in fits if one < model.heads][-1:] + [one for one in fits if one > model.heads][:1]
        yield Problem(
            "model.heads",
            f"model.width = {model.width} does not divide into model.heads = {model.heads} of even width",
            f"Heads that fit: {' or '.join(map(str, near))}." if near else "Set an even model.width.",
        )
    if model.preset == "llama":
        if model.heads % (model.kv_heads or 1):
            fits = [heads for heads in range(1, model.heads + 1) if model.heads % heads == 0]
            yield Problem(
                "model.kv_heads",
                f"model.heads = {model.heads} does not divide into model.kv_heads = {model.kv_heads} groups",
                f"KV heads that fit: {' or '.join(map(str, fits))}.",
            )
        return
    for key, value in (("kv_heads", model.kv_heads), ("mlp_width", model.mlp_width)):
        if value is not None:
            yield Problem(
                f"model.{key}",
                f"model.{key} = {value} means nothing to model.preset = {model.preset!r}",
                'Leave it out, or set model.preset = "llama".',
            )


def _place_problems(config: "Config") -> Iterator[Problem]:
    if "://" in config.run.out:
        yield Problem(
            "run.out",
            f"run.out = {json.dumps(config.run.out)} is a URL, and what a run writes line by line goes to a disk",
            "Set run.out to a folder; checkpoint.folder can be a URL.",
        )
    folder = config.checkpoint.folder
    if folder is not None and not folder.partition("://")[2 if "://" in folder else 0].strip("/ "):
        yield Problem(
            "checkpoint.folder",
            f"checkpoint.folder = {json.dumps(folder)} names no folder",
            "Set it to a folder, or a URL such as s3://bucket/run, or leave it out.",
        )
    elif folder is not None and ("::" in folder.partition("://")[0]):
        yield Problem(
            "checkpoint.folder",
            f"checkpoint.folder = {json.dumps(folder)} is a chain of URLs",
            "Set it to one URL, such as s3://bucket/run.",
        )


def _step_problems(config: "Config") -> Iterator[Problem]:
    steps, warmup, stop_after = config.run.steps, config.optimizer.warmup, config.run.stop_after
    if warmup > steps:
        yield Problem(
            "optimizer.warmup",
            f"optimizer.warmup = {warmup} is more than run.steps = {steps}, "
            "so the learning rate would never reach its peak",
            f"Set optimizer.warmup to {max(steps // 20, 1)} or so, or train for more steps. To see only the "
            "first steps of a long run, leave run.steps and set run.stop_after.",
        )
    if stop_after is not None and stop_after > steps:
        yield Problem(
            "run.stop_after",
            f"run.stop_after = {stop_after} is more than run.steps = {steps}",
            "Leave run.stop_after out to train all steps.",
        )


def _replica_problems(config: "Config", dp: int) -> Iterator[Problem]:
    """dp is cut into equal groups of two ranks or more."""
    replicas = config.zero.replicas
    fits = " or ".join(str(one) for one in range(1, dp) if dp % one == 0) or "1"
    if dp % replicas:
        yield Problem(
            "zero.replicas",
            f"zero.replicas = {replicas} does not cut dp = {_ranks(dp)} into equal groups",
            f"Set zero.replicas to {fits}, or parallel.dp to a multiple of {replicas}.",
        )
    elif replicas == dp > 1:
        yield Problem(
            "zero.replicas",
            f"zero.replicas = {replicas} on dp = {_ranks(dp)} makes groups of one rank, in which nothing is sharded",
            f"Set zero.replicas to {fits}; to shard nothing, zero.level = 0 and zero.replicas = 1.",
        )


def _offload_problems(config: "Config") -> Iterator[Problem]:
    """What is set means something, and what it needs is there."""
    offload, level = config.offload, config.zero.level
    home = offload.optimizer
    if home == "device":
        for key, field in type(offload).model_fields.items():
            value = getattr(offload, key)
            if value not in (field.default, None):
                wanted = '"disk"' if key == "folder" else '"host" or "disk"'
                yield Problem(
                    f"offload.{key}",
                    f'offload.{key} = {json.dumps(value)} at offload.optimizer = "device", where nothing is offloaded',
                    f"Set offload.optimizer to {wanted}, or leave offload.{key} out.",
                )
        return
    if offload.parameters == "host" and level != 3:
        yield Problem(
            "offload.parameters",
            f'offload.parameters = "host" at zero.level = {level}, where the device needs all weights at all times',
            "Set zero.level = 3, or leave offload.parameters out.",
        )
    if home == "disk" and not offload.folder:
        yield Problem(
            "offload.folder",
            'offload.optimizer = "disk" has no folder for its files',
            'Set offload.folder to a folder on a fast disk, or offload.optimizer = "host".',
        )
    if home == "host" and offload.folder is not None:
        yield Problem(
            "offload.folder",
            f'offload.folder = {json.dumps(offload.folder)} at offload.optimizer = "host", which writes no files',
            'Set offload.optimizer = "disk", or leave offload.folder out.',
        )
    if offload.fraction == "auto" and offload.device_mb is None:
        yield Problem(
            "offload.fraction",
            'offload.fraction = "auto" does not know what the device has room for',
            "Set offload.device_mb to the MB that model states may take there, or a fraction of at most 1.",
        )
    if offload.delayed_update and offload.fraction != 1.0:
        yield Problem(
            "offload.delayed_update",
            f"offload.delayed_update = {offload.delayed_update} and offload.fraction = {json.dumps(offload.fraction)}: "
            "what stays on the device would be updated in time, and the rest late",
            "Leave one of the two out.",
        )
    if offload.fraction != "auto" and offload.device_mb is not None:
        yield Problem(
            "offload.device_mb",
            f"offload.device_mb = {offload.device_mb:g} and offload.fraction = {offload.fraction:g} both say how much "
            "stays on the device",
            'Set offload.fraction = "auto", or leave offload.device_mb out.',
        )
    if config.zero.whole_parameters:
        yield Problem(
            "zero.whole_parameters",
            f"zero.whole_parameters = {json.dumps(config.zero.whole_parameters)} with offload.optimizer = "
            f'"{home}": the optimizer state of whole parameters stays on the device',
            'Leave zero.whole_parameters out and use an elementwise optimizer, or set offload.optimizer = "device".',
        )


def _home_problems(config: "Config", dp: int) -> Iterator[Problem]:
    """What leaves the device leaves in shards: at level 0 each rank would keep and update the same on the host."""
    home = config.offload.optimizer
    if home != "device" and config.zero.level == 0 and dp > 1:
        yield Problem(
            "offload.optimizer",
            f'offload.optimizer = "{home}" at zero.level = 0 on dp = {_ranks(dp)}, each of which would keep and update '
            "all of the optimizer state",
            f"Set zero.level to 1, 2 or 3, where each has 1/{dp} of it, or use one rank.",
        )


def filling_problems(config: "Config", world: int) -> Iterator[Problem]:
    """The ranks that were started can be shared by tp and pp, and dp fills what is left."""
    tp, pp = config.parallel.tp, config.parallel.pp
    if world % (tp * pp):
        degrees = [one for one in range(1, world + 1) if world % (one * pp) == 0]
        what = f"parallel.tp = {tp}" if pp == 1 else f"parallel.tp x parallel.pp = {tp} x {pp}"
        fits = " or ".join(str(one) for one in (world - world % (tp * pp), world - world % (tp * pp) + tp * pp) if one)
        yield Problem(
            "parallel.tp",
            f"{_ranks(world)} cannot be shared by {what}",
            f"Start {fits} ranks, or set parallel.tp to {' or '.join(map(str, degrees[:8])) or 1}.",
        )


def world_problems(config: "Config", dp: int, world: int) -> Iterator[Problem]:
    """The number of ranks that were started is the layout's, and dp can be cut into `zero.replicas` groups."""
    tp, pp = config.parallel.tp, config.parallel.pp
    if dp * tp * pp != world:
        needed = f"{dp} ranks" if tp == pp == 1 else f"{dp} x {tp} x {pp} = {dp * tp * pp} ranks"
        yield Problem(
            "parallel.dp",
            f"parallel.dp = {dp} needs {needed}, and {world} {'is' if world == 1 else 'are'} started",
            f'Start {dp * tp * pp} (-n {dp * tp * pp}), or set parallel.dp = "auto" to fill what is started.',
        )
    yield from _replica_problems(config, dp)
    yield from _home_problems(config, dp)


def batch_problems(config: "Config", dp: int) -> Iterator[Problem]:
    """The global batch is shared by dp ranks, and each part is computed in micro-batches."""
    batch, micro_batch = config.data.global_batch, config.parallel.micro_batch
    if batch < dp:
        yield Problem(
            "data.global_batch",
            f"fewer samples than ranks: data.global_batch = {batch} for dp = {dp} ranks",
            f"Set data.global_batch = {dp} or more, or start {_ranks(batch)}.",
        )
        return
    if batch % dp:
        below, above = batch - batch % dp, batch + dp - batch % dp
        fewer = next(size for size in range(dp - 1, 0, -1) if batch % size == 0)
        yield Problem(
            "data.global_batch",
            f"data.global_batch = {batch} does not divide over dp = {dp} ranks: "
            f"{batch} = {dp} x {batch // dp} + {batch % dp}",
            f"Set data.global_batch to {below} or {above}, or start {_ranks(fewer)}.",
        )
        return
    mine = batch // dp
    if micro_batch is None:
        return
    if micro_batch > mine:
        yield Problem(
            "parallel.micro_batch",
            f"parallel.micro_batch = {micro_batch} is more than a rank's part of the global batch: "
            f"{batch} samples / {_ranks(dp)} = {mine}",
            f"Set parallel.micro_batch to {mine} or less, or data.global_batch to {micro_batch * dp}.",
        )
    rounds = -(-mine // micro_batch)
    loses = config.precision.gradients == "compute" and config.precision.compute not in ("fp32", "auto")
    if loses and rounds > 1:
        yield Problem(
            "precision.gradients",
            f'precision.gradients = "compute" would round the sum of {rounds} micro-batches at each of them',
            'Set precision.gradients = "fp32" (exact; 4 bytes where they are held), '
            f"parallel.micro_batch = {mine} (one micro-batch), "
            'or precision.gradients = "compute-lossy" if the rounding is meant.',
        )


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
