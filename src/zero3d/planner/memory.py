"""Model-state bytes per rank: weights, gradients and optimizer state at ZeRO levels 0 to 3.

Formulas of ZeRO (Rajbhandari et al. 2020, section 5 and table 1) for Psi parameters over N ranks of dp, with
w bytes of weights, g of held gradients and K of optimizer state a parameter (w = g = 2, K = 12 in mixed
precision with Adam: fp32 master weight and two moments):

    level 0     (w + g + K) Psi
    level 1     (w + g) Psi + K Psi / N
    level 2      w Psi + (g + K) Psi / N
    level 3     (w + g + K) Psi / N

Gradients that are reduced once a step are whole on every rank until then, at each level. With replicas R
(`zero.replicas`) the ranks shard in R groups: N = dp / R.

With offload (ZeRO-Offload, Ren et al. 2021, section 3) the fp32 master, M moments and summed gradients leave the
device, where no gradient is held that is reduced once a micro-batch:

                device                host
    level 1, 2  w Psi                 (g + 4 + 4 M) Psi / N
    level 3     w Psi / N             (g + 4 + 4 M) Psi / N
      offload.parameters = "host"
                0                     (w + g + 4 + 4 M) Psi / N

>>> [round(states(7.5e9, level, dp=64).total / 1e9, 2) for level in LEVELS]
[120.0, 31.41, 16.64, 1.88]
>>> one = states(7.5e9, 2, dp=64, offload=Offload(optimizer="host"))
>>> one.device / 1e9, one.host / 1e9
(15.0, 1.640625)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from zero3d.config import Config, Offload
from zero3d.offload.budget import MASTER, MOMENT, HostWidths, need

LEVELS = (0, 1, 2, 3)
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOMENTS = {"sgd": 0, "adagrad": 1, "rmsprop": 1, "adadelta": 2, "adam": 2, "adamw": 2, "nadam": 2, "radam": 2}
"""Tensors of a parameter's size that an optimizer keeps; the others of torch.optim are taken to keep two."""

Offloaded = Literal["optimizer", "parameters"]
"""optimizer: with the summed gradients on the host; parameters: these and the weights."""
LEAST_LEVEL: dict[Offloaded, int] = {"optimizer": 1, "parameters": 3}

ON_DEVICE = Offload()


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes a parameter takes in each kind of model state."""

    weights: int = 2
    gradients: int = 2
    optimizer: int = 12


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes that one rank holds: by kind on its device, and of all kinds together in its machine's memory and files."""

    weights: int
    gradients: int
    optimizer: int
    host: int = 0
    disk: int = 0

    @property
    def device(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All memory, of device and host: what counts where they are the same."""
        return self.device + self.host


def states(
    parameters: float,
    level: int,
    *,
    dp: int,
    replicas: int = 1,
    widths: Widths = Widths(),
    reduce: Literal["step", "micro-batch"] | None = None,
    frozen: float = 0,
    offload: Offload = ON_DEVICE,
) -> ModelStates:
    """What each of `dp` ranks holds of `parameters` trained parameters and `frozen` others, which are weights alone;
    a part of a parameter counts as whole. `replicas`: groups of ranks that each hold all shards; divides `dp`.

    `reduce`: when gradients are reduced; left out, as late as the level allows what it promises, and with offload once
    a micro-batch. `offload`: its `fraction` counts exactly, where a run takes whole buckets; staging and what of files
    is in memory hang on buckets and are not counted.
    """
    if level not in LEVELS:
        raise ValueError(f"level {level} is outside 0 to 3")
    offloads = offload.optimizer != "device"
    if offloads and level == 0 and dp > 1:
        raise ValueError(f"level 0 on {dp} ranks shards nothing, so nothing is offloaded")
    reduce = reduce or ("step" if level <= 1 and not offloads else "micro-batch")
    if dp % replicas:
        raise ValueError(f"{dp} ranks cannot be cut into {replicas} equal groups")
    group = dp // replicas
    whole, shard = ceil(parameters), ceil(parameters / group)
    device = ModelStates(
        weights=widths.weights * (shard + ceil(frozen / group) if level >= 3 else whole + ceil(frozen)),
        gradients=widths.gradients * (whole if level == 0 or reduce == "step" else shard),
        optimizer=widths.optimizer * (shard if level >= 1 else whole),
    )
    return _offloaded(device, shard, offload, widths, reduce) if offloads else device


def _offloaded(
    device: ModelStates, shard: int, offload: Offload, widths: Widths, reduce: Literal["step", "micro-batch"]
) -> ModelStates:
    """What is left of `device`, and where the rest is; `shard`: trained elements that a rank has a shard of."""
    weights = 0 if offload.parameters == "host" else device.weights
    if offload.fraction == "auto":
        sums = widths.gradients if reduce == "micro-batch" else 0
        leaving = (sums + widths.optimizer) * shard
        excess = weights + device.gradients + device.optimizer - (offload.device_mb or 0) * 1e6
        part = min(max(excess / leaving, 0), 1) if leaving else 1.0
    else:
        part = offload.fraction
    gone = ceil(part * shard)
    # Beside weights that are fp32 the master takes nothing; away from them it does.
    moments, odd = divmod(widths.optimizer - (0 if widths.weights == MASTER else MASTER), MOMENT)
    on_disk = offload.optimizer == "disk"
    there = need(
        [(gone, HostWidths(weight=widths.weights, gradient=widths.gradients, moments=moments))],
        home="disk" if on_disk else "host",
        delayed=offload.delayed_update > 0,
        other_weights=device.weights - weights,
    )
    # States of less than 4 bytes, such as 8-bit moments, are no tensors that a home knows.
    kept = (there.disk if on_disk else there.master + there.moments) + odd * gone
    return ModelStates(
        weights=weights,
        gradients=device.gradients if reduce == "step" else widths.gradients * (shard - gone),
        optimizer=widths.optimizer * (shard - gone),
        host=there.gradients + there.weights + (0 if on_disk else kept),
        disk=kept if on_disk else 0,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table of a parameter count. offload: what is on the host, None where nothing is."""

    level: int
    states: ModelStates
    offload: Offloaded | None = None


def table(
    parameters: float,
    *,
    dp: int,
    widths: Widths = Widths(),
    levels: Sequence[int] = LEVELS,
    offloads: Sequence[Offloaded] = ("optimizer", "parameters"),
) -> list[Row]:
    """What a rank holds at each of `levels`, and below that what each of `offloads` leaves of it where a level can do
    that. Gradients are reduced once a micro-batch from level 2 on, and with offload, as in the papers."""
    rows = [Row(level=level, states=states(parameters, level, dp=dp, widths=widths)) for level in levels]
    for offloaded in offloads:
        home = Offload(optimizer="host", parameters="host" if offloaded == "parameters" else "device")
        rows += [
            Row(level=level, states=states(parameters, level, dp=dp, widths=widths, offload=home), offload=offloaded)
            for level in levels
            if level >= LEAST_LEVEL[offloaded]
        ]
    return rows


def most_parameters(
    device_bytes: float, level: int, *, dp: int, tp: int = 1, widths: Widths = Widths(), offload: Offload = ON_DEVICE
) -> float:
    """How many parameters a model may have whose states fill the devices of `device_bytes` each (ZeRO, table 2).

    `tp`: the model is cut into so many equal parts first; infinite where all of it is on the host. An upper limit:
    activations, buffers and fragments want room too.

    >>> [round(most_parameters(32e9, level, dp=64) / 1e9, 1) for level in LEVELS]
    [2.0, 7.6, 14.4, 128.0]
    """
    parameters = 10**12  # Enough for the rounding of a shard not to show.
    taken = states(parameters, level, dp=dp, widths=widths, offload=offload).device / parameters
    return device_bytes * tp / taken if taken else inf


def widths_of(config: Config) -> Widths:
    """Bytes a parameter takes under a configuration; "model" counts as fp32, "auto" as bf16.

    An fp32 weight is its own master, so fp32 Adam has K = 8, as has plain fp32 training.
    """
    weights = BYTES.get(config.precision.compute, 2 if config.precision.compute == "auto" else 4)
    master = 0 if weights == 4 else 4
    return Widths(
        weights=weights,
        gradients=4 if config.precision.gradients == "fp32" else weights,
        optimizer=master + 4 * MOMENTS.get(config.optimizer.name.lower(), 2),
    )


def at_each_level(config: Config, parameters: int, dp: int, frozen: int = 0) -> list[ModelStates]:
    """The table of levels 0 to 3 for a configuration; its own level keeps its own `zero.reduce`, and each has of its
    offload what is possible there."""
    widths = widths_of(config)
    own = None if config.zero.reduce == "auto" else config.zero.reduce
    return [
        states(
            parameters,
            level,
            dp=dp,
            replicas=config.zero.replicas,
            widths=widths,
            reduce=own if level == config.zero.level else None,
            frozen=frozen,
            offload=_honoured(config, level, dp),
        )
        for level in LEVELS
    ]


def _honoured(config: Config, level: int, dp: int) -> Offload:
    """What of the configuration's offload `level` can honour."""
    if level == 0 and dp > 1:
        return ON_DEVICE
    return config.offload if level == 3 else config.offload.model_copy(update={"parameters": "device"})
