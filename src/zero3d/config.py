"""Every option and its meaning.

A configuration is TOML, a dict or a `Config`. Values are frozen once checked; unknown keys are refused with
the nearest known one. `Config.resolved` replaces every "auto", so that what is printed, saved and run is
one and the same. Reading and writing is in config_io.py, the checks across options in config_checks.py.

>>> config = Config.load({"data": {"global_batch": 8}}, ["zero.level=3"]).resolved(world=2, native_bf16=False)
>>> config.parallel.dp, config.parallel.micro_batch, config.zero.reduce, config.precision.reduce
(2, 4, 'micro-batch', 'own')
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zero3d import config_checks, config_io
from zero3d.errors import ConfigError
from zero3d.layout import Layout

Positive = Annotated[int, Field(ge=1)]
Tokens = Annotated[int, Field(ge=1, le=1 << 24)]
NotNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
FromList = Field(strict=False)  # TOML has lists where we hold tuples


OTHER_WORDS = {
    "batch_size": "data.global_batch",
    "train_batch_size": "data.global_batch",
    "train_micro_batch_size_per_gpu": "parallel.micro_batch",
    "gradient_accumulation_steps": "parallel.micro_batch (micro-batches follow from it)",
    "accumulation": "parallel.micro_batch (micro-batches follow from it)",
    "seq_len": "data.sequence_length",
    "max_steps": "run.steps",
    "epochs": "run.steps",
    "learning_rate": "optimizer.lr",
    "grad_clip": "optimizer.clip_norm",
    "gradient_clipping": "optimizer.clip_norm",
    "warmup_steps": "optimizer.warmup",
    "stage": "zero.level",
    "zero_stage": "zero.level",
    "dtype": "precision.compute",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "activation_checkpointing": "recompute.mode",
    "cpu_offload": "offload.optimizer",
    "offload_optimizer": "offload.optimizer",
    "offload_param": "offload.parameters",
    "nvme_path": "offload.folder",
}
"""What other tools call things -> the key here, for the hint when one is not known."""


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, fields documented by the strings below them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Run(Section):
    name: str = "run"
    """What the run is called on the screen and in its records."""
    out: str = "runs/run"
    """The folder that receives metrics, the resolved configuration and what else the run writes."""
    seed: Annotated[int, Field(ge=0, le=1_000_000_000_000, strict=True)] = 0
    """Weights depend on it and their name alone; dropout on it, step, micro-batch, dp index and block."""
    steps: Positive = 100
    """Optimizer updates that the learning-rate schedule is planned for."""
    stop_after: Positive | None = None
    """End after this many steps although the schedule goes on to `steps`."""
    log_every: Positive = 1
    """A line in metrics.jsonl every so many steps."""
    timeout_seconds: Positive = 300
    """How long a rank waits for another before it reports it gone."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """The project at Weights & Biases that the run is logged to; needs the package wandb. Left out: none."""
    check_every: NotNegative = 0
    """Every so many steps, compare the weights that tensor-parallel ranks, or stages with tied weights, should hold
    alike, and end with an error where they differ; 0: never."""


class Model(Section):
    preset: str | None = "gpt"
    """A model that ships with zero3d: "gpt" or "llama"."""
    path: str | None = None
    """In place of a preset: `package.module:function` that returns an nn.Module; needs --allow-code."""
    blocks: str | None = None
    """Path of the list of repeated blocks, such as "transformer.h", or several with commas; found by itself when left
    out."""
    width: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Preset: size of the residual stream."""
    layers: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Preset: number of blocks."""
    heads: Positive = 4
    """Preset: attention heads; divides `width`."""
    kv_heads: Positive | None = None
    """Preset "llama": heads of keys and values, each shared by a group of `heads`; divides `heads`. Left out, as many
    as `heads`."""
    mlp_width: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Preset "llama": inner size of the MLP; left out, 8/3 of `width`, rounded up to a multiple of 64."""
    dropout: Decay = 0.0
    """Preset: dropout probability after attention, MLP and embedding."""
    tied: bool | None = None
    """Preset: the output layer uses the token embedding's weight; left out, it does in "gpt" and not in "llama"."""


class Data(Section):
    source: Annotated[str, Field(min_length=1)] = "python-stdlib"
    """"python-stdlib" (the running Python's source files), a text file, a folder of text, or a token file."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a Hugging Face `tokenizers` JSON file."""
    sequence_length: Tokens = 256
    """Tokens a sample is trained on."""
    global_batch: Annotated[int, Field(ge=1, le=10_000_000)] = 32
    """Samples in one step, over all ranks and micro-batches."""


class Optimizer(Section):
    name: str = "adamw"
    """"adamw", or the name of a class in torch.optim, in any case; one that looks at whole matrices needs
    zero.whole_parameters."""
    lr: Rate = 1e-3
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], FromList] = (0.9, 0.95)
    """Adam's decay rates; given to optimizers that take them."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term in the denominator; given to optimizers that take it."""
    weight_decay: Rate = 0.1
    """Decay of the weights that `no_decay` does not match; given to optimizers that take it."""
    no_decay: Annotated[tuple[str, ...], FromList] = ("1d",)
    """Patterns of parameter names without weight decay; "1d" stands for those with fewer than two dims."""
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
    sequence_parallel: bool = False
    """What tensor parallelism leaves whole (norms, dropout, residuals) runs on 1/tp of the sequence."""
    schedule: str = "1f1b"
    """How pipeline stages take turns: gpipe, 1f1b, interleaved, zbh1, zbh2, zbv, or a text file of your own (.txt)."""
    stages_per_rank: Positive = 1
    """Stages that each pipeline rank computes; more than one for interleaved and zbv."""
    stage_blocks: Annotated[tuple[Positive, ...], FromList] = ()
    """Blocks of each stage; left out, they are cut so that stages take about as long."""
    first_stage: Annotated[tuple[str, ...], FromList] = ()
    """Patterns of modules outside the blocks that run before them, where they are not defined before them."""
    last_stage: Annotated[tuple[str, ...], FromList] = ()
    """Patterns of modules outside the blocks that run after them, where they are not defined after them."""
    plan: dict[str, str] = {}
    """What tensor parallelism cuts: patterns of module paths and their styles, such as "blocks.*.up" = "colwise" and
    "blocks.*.down" = "rowwise". They come before those of a plan that the model brings."""
    pp: Positive = 1
    """Pipeline ranks."""
    micro_batch: Positive | None = None
    """Samples that one rank computes at a time; left out, a rank's whole part of the global batch."""


class Zero(Section):
    level: int = 2
    """0 nothing sharded over dp, 1 optimizer state, 2 + gradients, 3 + parameters."""
    bucket_mb: Annotated[float, Field(gt=0)] = 16.0
    """Largest flat buffer, in MB of its dtype; a block that is larger is cut into several buckets. Small blocks
    that follow each other share one, of a quarter of the model at most at levels 0 and 1, of 1 MB at 2 and 3."""
    prefetch: NotNegative = 1
    """Level 3: how many blocks are gathered ahead of use."""
    reduce: Literal["auto", "step", "micro-batch"] = "auto"
    """When gradients are reduced: once a step (default at levels 0 and 1, and in a pipeline) or once a micro-batch
    (at 2 and 3, and at each level with offload.optimizer, so that the device holds no sums)."""
    overlap: bool = True
    """Reductions and gathers run while the model computes; off, each is waited for at once."""
    keep_gathered: Annotated[tuple[str, ...], FromList] | Literal["step"] = ()
    """Level 3: patterns of names of parameters that are gathered at the start of each forward and of each backward,
    whichever modules run: for blocks that some ranks leave out, or run in another order. What shares a bucket with
    them is gathered too. "step": all stay from their first use to the end of the step, whatever the number of
    micro-batches. At levels 0 to 2 ranks may run different modules as it is, and the key changes nothing."""
    whole_parameters: Annotated[tuple[str, ...], FromList] = ()
    """Patterns of names of parameters whose optimizer state stays whole on one rank, for optimizers that look at whole
    matrices, such as Muon or Adafactor; "auto" stands for those whose optimizer does."""
    replicas: Positive = 1
    """Levels 1 to 3: shard within groups of dp / replicas ranks, and reduce across the groups."""


class Offload(Section):
    optimizer: Literal["device", "host", "disk"] = "device"
    """Home of master weights and optimizer state, and where they are updated. "host": this machine's memory, summed
    gradients too. "disk": files in `folder`, updated by the host, with summed gradients in its memory."""
    parameters: Literal["device", "host"] = "device"
    """Level 3: home of the shards of the weights that the model computes with; "host": they are brought ahead of
    use."""
    folder: str | None = None
    """optimizer = "disk": the folder of its files, on a disk of this machine."""
    delayed_update: NotNegative = 0
    """0: a step ends with its update. N: after N steps of warm-up the host updates for one step while the device
    computes the next, whose weights are then one update behind."""
    fraction: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = 1.0
    """The part of the elements whose optimizer goes to its home, in whole buckets; the rest stays on the device.
    "auto": as little as makes the device's part fit `device_mb`, which each rank finds from its buckets."""
    device_mb: Annotated[float, Field(gt=0)] | None = None
    """fraction = "auto": MB that a rank's weights, held gradients and optimizer state may take on its device."""
    threads: Positive | Literal["auto"] | None = "auto"
    """Threads of a rank's update on the host; "auto": the cores of the machine divided by its ranks, which each machine
    finds for itself."""


class Precision(Section):
    compute: Literal["model", "auto", "fp32", "bf16", "fp16"] = "model"
    """Dtype of weights and activations; "model" leaves each parameter's own, "auto" takes bf16 where that is
    no slower than fp32, else fp32."""
    reduce: Literal["auto", "own", "fp32", "bf16", "fp16"] = "auto"
    """Dtype in which gradients travel; sums are in fp32 whatever travels. "own": the dtype each gradient has
    (as held when reduced once a step, its parameter's when once a micro-batch). "auto" loses nothing."""
    gradients: Literal["fp32", "compute", "compute-lossy"] = "fp32"
    """Dtype of held gradients. "compute" keeps 2 bytes for 16-bit weights and is refused when micro-batches
    accumulate, as their sum would be rounded each time; "compute-lossy" asks for that by name."""


class Recompute(Section):
    mode: Literal["none", "block"] = "none"
    """"block": a block's activations are computed again in backward instead of being kept."""


class Checkpoint(Section):
    every: NotNegative = 1000
    """Save every so many steps, and after the last one; 0: never."""
    folder: str | None = None
    """Where checkpoints go: a folder, or with the extra `remote` a URL such as s3://bucket/run, of this run alone. Left
    out: the folder `checkpoints` of `run.out`."""
    keep: Positive = 2
    """How many of the newest checkpoints stay."""
    keep_every: NotNegative = 0
    """Those of steps that this divides stay too; 0: no others."""
    background: bool = True
    """Files are written while training goes on; off, it waits for them."""


class Config(Section):
    """The whole configuration. See docs/configuration.md for a page made from these texts."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    zero: Zero = Zero()
    offload: Offload = Offload()
    precision: Precision = Precision()
    recompute: Recompute = Recompute()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="before")
    @classmethod
    def _path_in_place_of_preset(cls, tree: Any) -> Any:
        """A model of the user's own leaves no preset standing."""
        model = tree.get("model") if isinstance(tree, dict) else None
        if isinstance(model, dict) and model.get("path") is not None and "preset" not in model:
            return {**tree, "model": {**model, "preset": None}}
        return tree

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in config_checks.problems(self):
            raise ConfigError(problem.message, hint=problem.hint, where=problem.key)
        return self

    @classmethod
    def load(cls, source: "Config | Mapping[str, Any] | str | Path", overrides: Sequence[str] = ()) -> "Config":
        """A checked configuration from a TOML file's path, a dict of sections, or another Config.

        `overrides` are `section.key=value` texts. All that is wrong becomes one `ConfigError`.
        """
        origin = config_io.Origin()
        if isinstance(source, Config):
            tree = source.model_dump(exclude_unset=True)
        elif isinstance(source, Mapping):
            tree = {name: dict(keys) if isinstance(keys, Mapping) else keys for name, keys in source.items()}
        else:
            tree, origin = config_io.read_toml(Path(source))
        schemas = cls.key_schemas()
        config_io.override(tree, origin, overrides, schemas)
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            # pydantic's own text names types and links, not what a user of this key has to write.
            raise config_io.explain(error.errors(include_url=False), origin, schemas, OTHER_WORDS) from None

    @classmethod
    @cache
    def key_schemas(cls) -> dict[str, dict[str, dict[str, Any]]]:
        """section -> key -> JSON schema, with the key's text as its description."""
        sections = {name: field.annotation for name, field in cls.model_fields.items()}
        return {
            name: section.model_json_schema()["properties"]
            for name, section in sections.items()
            if isinstance(section, type) and issubclass(section, Section)
        }

    def resolved(self, world: int, native_bf16: bool, *, own_batches: bool = False) -> "Config":
        """The same with no "auto" left, checked for `world` ranks. (Two of `[offload]` stay where something is
        offloaded: `fraction`, to which ranks with other buckets have other answers, and `threads`, as other machines.)

        `native_bf16`: products in bf16 are no slower than in fp32 on this machine. `own_batches`: the caller
        brings its batches, so `[data]` says nothing about them and a missing `micro_batch` stays missing.
        Raises `ConfigError` where the sizes do not fit `world`.
        """
        dp = self.parallel.dp
        if dp == "auto":
            for problem in config_checks.filling_problems(self, world):
                raise ConfigError(problem.message, hint=problem.hint)
            dp = Layout(tp=self.parallel.tp, pp=self.parallel.pp).with_dp_filling(world).dp
        for problem in (
            *config_checks.world_problems(self, dp, world),
            *(() if own_batches else config_checks.batch_problems(self, dp)),
        ):
            raise ConfigError(problem.message, hint=problem.hint)
        micro_batch = self.parallel.micro_batch
        if micro_batch is None and not own_batches:
            micro_batch = self.data.global_batch // dp
        when = self.zero.reduce
        if when == "auto":
            late = self.zero.level <= 1 and self.offload.optimizer == "device"
            when = "step" if late or self.parallel.pp > 1 else "micro-batch"
        compute = self.precision.compute
        if compute == "auto":
            compute = "bf16" if native_bf16 else "fp32"
        travel = self.precision.reduce
        if travel == "auto":
            held_fp32 = when == "step" and self.precision.gradients == "fp32"
            travel = "fp32" if held_fp32 else "own" if compute == "model" else compute
        tree = self.model_dump()
        tree["parallel"] |= {"dp": dp, "micro_batch": micro_batch}
        tree["zero"] |= {"reduce": when}
        if self.offload.threads in ("auto", None):
            tree["offload"] |= {"threads": None if self.offload.optimizer == "device" else "auto"}
        tree["precision"] |= {"compute": compute, "reduce": travel}
        if own_batches:
            del tree["data"]["global_batch"]
        return Config.load(tree)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in one step; the last may be smaller. Known once resolved."""
        dp, micro_batch = self.parallel.dp, self.parallel.micro_batch
        assert dp != "auto" and micro_batch is not None, "only a resolved configuration has this"
        return -(-self.data.global_batch // (dp * micro_batch))

    @property
    def num_steps(self) -> int:
        """Steps this run takes: `stop_after` when it is set, else `steps`."""
        return self.run.stop_after or self.run.steps

    def to_toml(self, *, notes: bool = False) -> str:
        """As TOML that `load` reads back to an equal Config; `notes` adds what each key means."""
        texts = {
            f"{section}.{key}": " ".join(str(one.get("description", "")).split())
            for section, keys in self.key_schemas().items()
            for key, one in keys.items()
        }
        return config_io.write_toml(self.model_dump(), texts if notes else {})
