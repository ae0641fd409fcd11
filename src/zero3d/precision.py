"""Which dtype everything has, and the loss scaler of fp16."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log2
from typing import Any

import torch
from torch import Tensor

from zero3d.config import Config
from zero3d.contracts import Axis
from zero3d.errors import ConfigError
from zero3d.params import ParamInfo

NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """The rules of `[precision]`; None: no rule, the dtype follows from what it is made of."""

    compute_rule: torch.dtype | None
    held_rule: torch.dtype | None
    wire_rule: torch.dtype | None
    every_turn: bool

    def compute(self, info: ParamInfo) -> torch.dtype:
        """Of a parameter while the model runs; integers and frozen quantised weights stay what they are."""
        if self.compute_rule is None or not info.dtype.is_floating_point:
            return info.dtype
        return self.compute_rule

    def check(self, infos: Iterable[ParamInfo]) -> None:
        for info in infos:
            dtype = self.compute(info)
            if info.trainable and dtype not in NAMES.values():
                raise ConfigError(
                    f"parameter {info.name} is {str(dtype).removeprefix('torch.')} and is to be trained",
                    where="precision.compute",
                    hint='Master weights are fp32. Set precision.compute = "fp32", or freeze the parameter.',
                )

    def held(self, compute: torch.dtype) -> torch.dtype:
        """Of gradients that are kept."""
        return self.held_rule or compute

    def wire(self, compute: torch.dtype) -> torch.dtype:
        """Of gradients that travel: one micro-batch's gradient loses nothing in the dtype it was computed in, a sum of
        several loses nothing in the dtype in which it is held."""
        return self.wire_rule or (compute if self.every_turn else self.held(compute))


class Scaler:
    """fp16 loss scaling: doubles after `growth_interval` good steps in a row, halves after a bad one.

    Losses are sums over tokens, so the first scale is 2**16 over the first step's tokens, rounded to a power of two.
    Without fp16 the scale is 1 and stays.
    """

    def __init__(self, *, enabled: bool, growth_interval: int = 1000) -> None:
        self.enabled = enabled
        self.scale = 1.0
        self.bad_steps = 0
        self._good_steps = 0
        self._growth_interval = growth_interval
        self._started = not enabled
        self._shares = enabled

    def for_loss(self, axis: Axis, count: Tensor) -> float:
        """The scale of a micro-batch's loss; `count` of its targets, added over ranks, sets the very first one."""
        if not self._started:
            tokens = count.clone().view(1)
            axis.all_reduce(tokens, "targets of the first micro-batch").wait()
            self.scale = 2.0 ** (16 - max(int(tokens), 1).bit_length())
            self._started = True
        return self.scale

    def share(self, knows: bool, axis: Axis, device: torch.device) -> None:
        """The first scale is known on one rank of `axis`, whose loss it was; now on all."""
        if self._started and not self._shares:
            return
        exponent = torch.tensor([int(log2(self.scale)) if knows else 0], dtype=torch.int64, device=device)
        axis.all_reduce(exponent, "first loss scale").wait()
        self.scale, self._started, self._shares = 2.0 ** int(exponent), True, False

    def go_on_from(self, other: "Scaler") -> None:
        """Continues where `other` stopped."""
        self.scale, self.bad_steps = other.scale, other.bad_steps
        self._good_steps, self._started = other._good_steps, other._started
        self._shares = other._shares

    def state(self) -> dict[str, Any]:
        """What a scaler goes on from in another process."""
        return {
            "enabled": self.enabled,
            "scale": self.scale,
            "bad_steps": self.bad_steps,
            "good_steps": self._good_steps,
            "started": self._started,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Where it or the other is no fp16 scaler there is nothing to go on from."""
        if self.enabled and state["enabled"]:
            self.scale, self.bad_steps = state["scale"], state["bad_steps"]
            self._good_steps, self._started = state["good_steps"], state["started"]
            self._shares = not self._started

    def update(self, finite: bool) -> None:
        """After a step whose numbers were `finite`, or not and so left out."""
        self.bad_steps = 0 if finite else self.bad_steps + 1
        self._good_steps = self._good_steps + 1 if finite else 0
        if not self.enabled:
            return
        if not finite:
            self.scale /= 2.0
        elif self._good_steps % self._growth_interval == 0:
            self.scale *= 2.0


def dtypes_for(config: Config) -> Dtypes:
    """The rules of a resolved configuration."""
    precision, every_turn = config.precision, config.zero.reduce == "micro-batch"
    return Dtypes(
        compute_rule=NAMES.get(precision.compute),
        held_rule=torch.float32 if precision.gradients == "fp32" else None,
        wire_rule=NAMES.get(precision.reduce),
        every_turn=every_turn,
    )


def refuse_rounding(config: Config, num_micro_batches: int, held: Iterable[torch.dtype]) -> None:
    """Raises `ConfigError` where the sum of several micro-batches, held in these dtypes, would be rounded each time
    and nobody asked for that by name."""
    rounds = any(dtype != torch.float32 for dtype in held)
    if num_micro_batches > 1 and rounds and config.precision.gradients == "compute":
        raise ConfigError(
            f'precision.gradients = "compute" would round the sum of {num_micro_batches} micro-batches each time',
            hint='Use "fp32", or ask for it by name with "compute-lossy".',
        )


def native_bf16() -> bool:
    """Whether products in bf16 are no slower than in fp32 here: a GPU, or a CPU with instructions for them."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    cpu = torch.backends.cpu.get_cpu_capability()
    has = getattr(torch.cpu, "_is_amx_tile_supported", None), getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return "AVX512" in cpu and any(check is not None and check() for check in has)
