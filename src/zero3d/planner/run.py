"""What a step is, beside its workload: sizes, level, schedule and how the software goes about it. Pure."""

from dataclasses import dataclass, replace

from zero3d.config import Config
from zero3d.planner.memory import BYTES, widths_of
from zero3d.planner.speed import RECOMPUTE, Again, Software

AS_ZERO3D = Software()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a step is, beside its workload. Keys of the same names are those of a configuration, resolved.

    micro_batch: samples; travel, held: bytes of a gradient that travels, and that is held
    keep_gathered: level 3: weights are gathered once a step
    offload: part of the elements whose optimizer is on the host
    """

    dp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    stage_blocks: tuple[int, ...] = ()
    micro_batch: float = 1
    micro_batches: int = 1
    level: int = 0
    replicas: int = 1
    reduce: str = "step"
    keep_gathered: bool = False
    travel: int = 4
    held: int = 4
    recompute: Again = RECOMPUTE["none"]
    offload: float = 0.0
    offload_parameters: bool = False
    delayed_update: bool = False
    software: Software = AS_ZERO3D

    @property
    def samples(self) -> float:
        """Of the global batch."""
        return self.dp * self.micro_batch * self.micro_batches

    @property
    def stages(self) -> int:
        return self.pp * self.stages_per_rank

    @classmethod
    def of(cls, config: Config) -> "Run":
        """That of a resolved configuration. The disk as the optimizer's home counts as the host, and offload.fraction =
        "auto" as all of it."""
        parallel, zero, offload = config.parallel, config.zero, config.offload
        assert parallel.dp != "auto" and parallel.micro_batch is not None and zero.reduce != "auto", "resolved"
        widths = widths_of(config)
        fraction = 1.0 if offload.fraction == "auto" else offload.fraction
        own = widths.gradients if zero.reduce == "step" else widths.weights
        return cls(
            dp=parallel.dp,
            pp=parallel.pp,
            schedule=parallel.schedule,
            stages_per_rank=parallel.stages_per_rank,
            stage_blocks=parallel.stage_blocks,
            micro_batch=parallel.micro_batch,
            micro_batches=config.micro_batches,
            level=zero.level,
            replicas=zero.replicas,
            reduce=zero.reduce,
            keep_gathered=zero.keep_gathered == "step",
            travel=BYTES.get(config.precision.reduce, own),
            held=widths.gradients,
            recompute=RECOMPUTE[config.recompute.mode],
            offload=fraction if offload.optimizer != "device" else 0.0,
            offload_parameters=offload.parameters == "host",
            delayed_update=offload.delayed_update > 0,
            software=replace(AS_ZERO3D, overlap_dp=zero.overlap),
        )
