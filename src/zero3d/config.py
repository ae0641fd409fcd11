"""Every option, its meaning, and all checks across options.

A configuration is TOML, a dict or a `Config`. Values are frozen once checked; unknown keys are refused with
the nearest known one. `Config.resolved` replaces every "auto", so that what is printed, saved and run is
one and the same.
"""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from zero3d.errors import ConfigError

Dtype = Literal["fp32", "bf16", "fp16"]
Positive = Annotated[int, Field(ge=1, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
Rate = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, fields documented by the strings below them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Run(Section):
    name: str = "run"
    """What the run is called on the screen and in its records."""
    out: str = "runs/run"
    """The folder that receives metrics, the resolved configuration and what else the run writes."""
    seed: NotNegative = 0
    """Weights depend on the seed and a parameter's name alone; dropout on seed, step, micro-batch, rank, block."""
    steps: Positive = 100
    """Optimizer updates that the learning-rate schedule is planned for."""
    stop_after: Positive | None = None
    """End after this many steps although the schedule goes on to `steps`."""
    log_every: Positive = 1
    """A line in metrics.jsonl every so many steps."""
    timeout_seconds: Positive = 300
    """How long a rank waits for another before it reports it gone."""


class Model(Section):
    preset: str | None = "gpt"
    """A model that ships with zero3d: "gpt"."""
    path: str | None = None
    """`package.module:function` that returns an nn.Module; needs --allow-code on the command line."""
    blocks: str | None = None
    """Path of the list of repeated blocks, such as "transformer.h"; found by itself when left out."""
    width: Positive = 256
    """Preset: size of the residual stream."""
    layers: Positive = 6
    """Preset: number of blocks."""
    heads: Positive = 4
    """Preset: attention heads; divides `width`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Preset: dropout probability after attention, MLP and embedding."""
    tied: bool = True
    """Preset: the output layer uses the token embedding's weight."""


class Data(Section):
    source: str = "python-stdlib"
    """"python-stdlib" (the source files of the running Python), a text file, a folder of text, or a token file."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a Hugging Face `tokenizers` JSON file."""
    sequence_length: Positive = 256
    """Tokens a sample is trained on."""
    global_batch: Positive = 32
    """Samples in one step, over all ranks and micro-batches."""


class Optimizer(Section):
    name: str = "adamw"
    """"adamw", or the name of any elementwise class in torch.optim, in any case."""
    lr: Rate = 1e-3
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Adam's decay rates; given to optimizers that take them."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term in the denominator; given to optimizers that take it."""
    weight_decay: Rate = 0.1
    """Decay of the weights that `no_decay` does not match; given to optimizers that take it."""
    no_decay: tuple[str, ...] = ("1d",)
    """Patterns of parameter names without weight decay; "1d" stands for all with fewer than two dimensions."""
    clip_norm: Rate = 0.0
    """Largest global gradient norm; 0 leaves gradients as they are."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes from its peak to `final_lr` over `run.steps`."""
    warmup: NotNegative = 0
    """Steps in which the learning rate rises from 0 to its peak."""
    final_lr: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the linear and cosine schedules end, as a part of the peak."""


class Parallel(Section):
    dp: Positive | Literal["auto"] = "auto"
    """Data-parallel ranks; "auto" fills the world."""
    tp: Positive = 1
    """Tensor-parallel ranks."""
    pp: Positive = 1
    """Pipeline ranks."""
    micro_batch: Positive | None = None
    """Samples that one rank computes at a time; left out, a rank's whole part of the global batch."""


class Zero(Section):
    level: Annotated[int, Field(strict=True)] = 2
    """0 nothing sharded over dp, 1 optimizer state, 2 + gradients, 3 + parameters."""
    bucket_mb: Annotated[float, Field(gt=0)] = 16.0
    """Largest flat buffer, in MB of its dtype; a block that is larger is cut into several buckets."""
    prefetch: NotNegative = 1
    """Level 3: how many blocks are gathered ahead of use."""
    reduce: Literal["auto", "step", "micro-batch"] = "auto"
    """When gradients are reduced: once a step (default at levels 0 and 1) or once a micro-batch (2 and 3)."""
    overlap: bool = True
    """Reductions and gathers run while the model computes; off, each is waited for at once."""


class Precision(Section):
    compute: Literal["model", "auto", "fp32", "bf16", "fp16"] = "model"
    """Dtype of weights and activations; "model" leaves each parameter's own, "auto" takes bf16 where it is no slower."""
    reduce: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype in which gradients travel; sums are in fp32 whatever travels. "auto": the dtype that loses nothing."""
    gradients: Literal["fp32", "compute", "compute-lossy"] = "fp32"
    """Dtype of held gradients. "compute" keeps 2 bytes for 16-bit weights and is refused when micro-batches
    accumulate, as their sum would be rounded each time; "compute-lossy" asks for that by name."""


class Recompute(Section):
    mode: Literal["none", "block"] = "none"
    """"block": a block's activations are computed again in backward instead of being kept."""


def _nearest(word: str, known: Sequence[str]) -> str | None:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return found[0] if found else None


class Config(Section):
    """The whole configuration. See docs/configuration.md for a page made from these texts."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    zero: Zero = Zero()
    precision: Precision = Precision()
    recompute: Recompute = Recompute()
