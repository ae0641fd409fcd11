"""Model FLOPs utilisation: the part of a device's peak that the model's own arithmetic is.

Counted as in PaLM (Chowdhery et al. 2022, appendix B): 6 FLOPs a trained parameter and token, forward and backward, and
for attention 12 a block, channel and position looked at. What is computed again, or of a mask, is not counted more or
less. Of models whose blocks nobody here knows, attention is left out, and the number is a little low.
"""

import torch

from zero3d.config import Config
from zero3d.planner.hardware import PRESETS

CHIPS = {"V100": "V100-32GB", "A100": "A100-80GB", "H100": "H100-80GB", "H200": "H200"}
"""What names of GPUs contain -> the preset whose peak is theirs, whatever their memory."""

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def peak_flops(name: str, dtype: str) -> float | None:
    """FLOP/s of products in `dtype` (fp32, tf32, fp16, bf16) of the GPU that its driver calls `name`; None: not known.

    >>> peak_flops("NVIDIA H200", "bf16") == 989e12, peak_flops("NVIDIA GeForce", "bf16")
    (True, None)
    """
    preset = next((preset for chip, preset in CHIPS.items() if chip in name.upper()), None)
    return PRESETS[preset].device.flops.get(dtype) if preset else None


def flops_per_token(config: Config, trainable: int) -> float:
    """Forward and backward of one token; `trainable`: parameters of the whole model."""
    model = config.model
    attention = 12 * model.layers * model.width * config.data.sequence_length if model.preset else 0
    return 6.0 * trainable + attention


class Mfu:
    """Of the steps of a run on `world` devices; `dtypes`: of its weights, as `engine.dtype_plan` has them."""

    def __init__(self, config: Config, trainable: int, world: int, device: torch.device, dtypes: str) -> None:
        self._flops = flops_per_token(config, trainable)
        peak = None
        if device.type == "cuda":
            dtype = next((short for name, short in NAMES.items() if name in dtypes.split(", ")), "")
            tf32 = dtype == "fp32" and torch.get_float32_matmul_precision() != "highest"
            peak = peak_flops(torch.cuda.get_device_name(device), "tf32" if tf32 else dtype)
        self._peak = peak and peak * world

    def of(self, tokens: int, seconds: float) -> float | None:
        """Of a step; None where the peak is not known, as on a CPU."""
        return self._flops * tokens / seconds / self._peak if self._peak and seconds > 0 else None
