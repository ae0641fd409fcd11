"""What DeepSpeed's memory estimators say, by their own convention, for people who compare.

The rules are those of `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs` (DeepSpeed,
docs/code-docs/source/memory.rst, its prints "GB" are of 2^30 bytes). Of P parameters over N devices, n on each node:

                                    device                  host of a node, times the buffer factor
    level 2                         4 P + 16 P/N            4 P n
      optimizer offloaded           2 P                     P max(4 N, 16)
    level 3                         4 L + 18 P/N            4 L n, built whole: 4 P n
      optimizer offloaded           4 L + 2 P/N             16 P n/N, built whole: P max(4 n, 16 n/N)
      and weights                   4 L                     18 P n/N, built whole: P max(4 n, 18 n/N)

with L parameters of the largest layer, whole for a moment. They differ from `memory.states`, which counts what zero3d
holds: 18 bytes where that has 16 (gradients are held twice), and 4 bytes on the host for each whole fp32 model that a
process builds before it is sharded.

>>> t5 = estimate(2.851e9, 3, devices=8, per_node=8, largest=32e6, offload="optimizer")
>>> round(t5.device / 2**30, 2), round(t5.host / 2**30, 2)
(0.78, 63.72)
"""

from dataclasses import dataclass
from typing import Literal

BUFFER_FACTOR = 1.5
"""What is added to host memory for buffers."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of each device, and of each node's host."""

    device: int
    host: int


def estimate(
    parameters: float,
    level: int,
    *,
    devices: int,
    per_node: int,
    largest: float = 0,
    offload: Literal["none", "optimizer", "parameters"] = "none",
    built_sharded: bool = True,
) -> Estimate:
    """largest: parameters of the largest layer, for level 3. built_sharded: under `zero.Init`, so that no process
    builds the whole model. Raises `ValueError` for a level or an offload that the estimators do not know."""
    if level == 2 and offload != "parameters":
        device, host = _level_2(parameters, devices, per_node, offloaded=offload == "optimizer")
    elif level == 3:
        device, host = _level_3(parameters, largest, devices, per_node, offload, built_sharded)
    else:
        raise ValueError(f"level {level} with offload {offload!r}: the estimators know 2 and 3, and weights at 3 alone")
    return Estimate(device=int(device), host=int(host * BUFFER_FACTOR))


def _level_2(parameters: float, devices: int, per_node: int, *, offloaded: bool) -> tuple[float, float]:
    if offloaded:
        return 2 * parameters, parameters * max(4 * devices, 16)
    return 4 * parameters + 16 * parameters / devices, 4 * parameters * per_node


def _level_3(
    parameters: float, largest: float, devices: int, per_node: int, offload: str, built_sharded: bool
) -> tuple[float, float]:
    on_device = {"none": 18.0, "optimizer": 2.0, "parameters": 0.0}[offload]
    on_host = {"none": 0.0, "optimizer": 16.0, "parameters": 18.0}[offload]
    here = per_node / devices * on_host
    if not built_sharded:
        host = parameters * max(4 * per_node, here)
    else:
        host = parameters * here if offload != "none" else 4 * largest * per_node
    return 4 * largest + on_device * parameters / devices, host
