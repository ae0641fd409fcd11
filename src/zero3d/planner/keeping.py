"""What of a resolved configuration decides how much a rank holds. Pure."""

from dataclasses import dataclass

from zero3d.config import Config, Offload
from zero3d.planner.memory import BYTES, widths_of
from zero3d.planner.workload import Part, Workload

ON_DEVICE = Offload()
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Keys of the same names are those of a configuration, resolved.

    group: ranks over which shards are cut; every_turn: gradients are reduced once a micro-batch
    wire, held: bytes of a gradient that travels, and that is held; None: those of its parameter
    moments: tensors of its size that the optimizer keeps of a shard; threads: of a rank's update on the host
    """

    group: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    stage_blocks: tuple[int, ...] = ()
    micro_batch: int = 1
    micro_batches: int = 1
    level: int = 2
    bucket_bytes: float = 16e6
    prefetch: int = 1
    every_turn: bool = False
    keeps_gathered: bool = False
    wire: int | None = 4
    held: int | None = 4
    moments: int = 2
    recompute: str = "none"
    offload: Offload = ON_DEVICE
    threads: int = 1

    @property
    def stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def offloads(self) -> bool:
        return self.offload.optimizer != "device"

    @property
    def effective_level(self) -> int:
        """On one rank level 1 is level 0, and weights are waited for that are updated elsewhere."""
        return max(self.level, 1) if self.offloads else self.level

    @classmethod
    def of(cls, config: Config, micro_batches: int | None = None, threads: int = 1) -> "Keeping":
        """That of a resolved configuration; threads: where it says "auto"."""
        parallel, zero, precision = config.parallel, config.zero, config.precision
        assert parallel.dp != "auto" and parallel.micro_batch is not None and zero.reduce != "auto", "resolved"
        widths = widths_of(config)
        every_turn = zero.reduce == "micro-batch"
        held = 4 if precision.gradients == "fp32" else None
        return cls(
            group=parallel.dp // zero.replicas,
            pp=parallel.pp,
            schedule=parallel.schedule,
            stages_per_rank=parallel.stages_per_rank,
            stage_blocks=parallel.stage_blocks,
            micro_batch=parallel.micro_batch,
            micro_batches=config.micro_batches if micro_batches is None else micro_batches,
            level=zero.level,
            bucket_bytes=zero.bucket_mb * 1e6,
            prefetch=zero.prefetch if parallel.stages_per_rank == 1 else 0,
            every_turn=every_turn,
            keeps_gathered=zero.keep_gathered == "step",
            wire=BYTES.get(precision.reduce, None if every_turn else held),
            held=held,
            moments=(widths.optimizer - (0 if widths.weights == 4 else 4)) // 4,
            recompute=config.recompute.mode,
            offload=config.offload,
            threads=config.offload.threads if isinstance(config.offload.threads, int) else threads,
        )

    def wire_of(self, weight: int) -> int:
        """Bytes of a travelling gradient of a parameter whose elements take `weight`."""
        return self.wire or (weight if self.every_turn else self.held_of(weight))

    def held_of(self, weight: int) -> int:
        return self.held or weight


@dataclass(frozen=True, eq=False)
class Place:
    """A part of the model in a stage of this rank's. number: of the part in the model's order; block: it is one."""

    number: int
    part: Part
    block: bool


def places(workload: Workload, stage_blocks: list[range], stages: list[int]) -> dict[int, list[Place]]:
    """stage -> its parts, of those of `stages`."""
    found: dict[int, list[Place]] = {}
    last = len(stage_blocks) - 1
    for stage in stages:
        mine = [Place(block + 1, workload.kinds[workload.order[block]], True) for block in stage_blocks[stage]]
        if workload.ends and mine and stage == 0:
            mine[0] = Place(mine[0].number, workload.ends[0], True)
        if workload.ends and mine and stage == last:
            mine[-1] = Place(mine[-1].number, workload.ends[1], True)
        if stage == 0:
            mine.insert(0, Place(0, workload.before, False))
        if stage == last:
            mine.append(Place(len(workload.order) + 1, workload.after, False))
        found[stage] = mine
    return found
