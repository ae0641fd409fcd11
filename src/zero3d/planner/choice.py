"""What a plan chooses, as the planner's other parts and as a configuration take it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from zero3d.config import Offload
from zero3d.planner.keeping import Keeping
from zero3d.planner.run import Run
from zero3d.planner.speed import RECOMPUTE

Offloaded = Literal["none", "optimizer", "parameters"]
HOMES: Mapping[Offloaded, Offload] = {
    "none": Offload(),
    "optimizer": Offload(optimizer="host"),
    "parameters": Offload(optimizer="host", parameters="host"),
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Keys of the same names are those of a configuration. keep_gathered: "step"; offload: what is on the host.

    samples: of one rank in a step
    """

    dp: int
    tp: int
    pp: int
    samples: int
    micro_batch: int
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    level: int = 0
    reduce: Literal["step", "micro-batch"] = "step"
    keep_gathered: bool = False
    sequence_parallel: bool = False
    recompute: Literal["none", "block"] = "none"
    offload: Offloaded = "none"

    @property
    def micro_batches(self) -> int:
        return -(-self.samples // self.micro_batch)

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp

    def travel(self, weight: int) -> int:
        """Bytes of a gradient that travels: what is held where it is reduced once a step."""
        return 4 if self.reduce == "step" else weight

    def keeping(self, weight: int, threads: int) -> Keeping:
        """weight: bytes of one; threads: of a rank's update on the host."""
        return Keeping(
            group=self.dp,
            pp=self.pp,
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            level=self.level,
            prefetch=1 if self.stages_per_rank == 1 else 0,
            every_turn=self.reduce == "micro-batch",
            keeps_gathered=self.keep_gathered,
            wire=self.travel(weight),
            recompute=self.recompute,
            offload=HOMES[self.offload],
            threads=threads,
        )

    def run(self, weight: int) -> Run:
        return Run(
            dp=self.dp,
            pp=self.pp,
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            level=self.level,
            reduce=self.reduce,
            keep_gathered=self.keep_gathered,
            travel=self.travel(weight),
            recompute=RECOMPUTE[self.recompute],
            offload=self.offload != "none",
            offload_parameters=self.offload == "parameters",
        )

    def sections(self, dtype: str) -> dict[str, dict[str, Any]]:
        """Of a configuration."""
        parallel: dict[str, Any] = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "micro_batch": self.micro_batch}
        if self.sequence_parallel:
            parallel["sequence_parallel"] = True
        if self.pp > 1:
            parallel |= {"schedule": self.schedule, "stages_per_rank": self.stages_per_rank}
        zero: dict[str, Any] = {"level": self.level, "reduce": self.reduce}
        if self.keep_gathered:
            zero["keep_gathered"] = "step"
        found: dict[str, dict[str, Any]] = {
            "parallel": parallel,
            "zero": zero,
            "precision": {"compute": dtype},
            "recompute": {"mode": self.recompute},
        }
        if self.offload != "none":
            found["offload"] = {"optimizer": "host"} | ({"parameters": "host"} if self.offload == "parameters" else {})
        return found

    def told(self) -> dict[str, str]:
        """What it says, in words of a configuration, for a comparison."""
        return {
            "layout": f"dp {self.dp} x tp {self.tp} x pp {self.pp}",
            "schedule": self.schedule if self.stages_per_rank == 1 else f"{self.schedule} {self.stages_per_rank}",
            "level": str(self.level),
            "reduce": self.reduce,
            "keep_gathered": "step" if self.keep_gathered else "no",
            "sequence_parallel": "yes" if self.sequence_parallel else "no",
            "micro_batch": str(self.micro_batch),
            "recompute": self.recompute,
            "offload": self.offload,
        }

    def changed(self, **changes: Any) -> "Choice":
        return replace(self, **changes)


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def ways_to_keep(dp: int) -> list[dict[str, Any]]:
    """Levels, when they reduce and gather, and what is offloaded, none of which is another in other words."""
    offloaded: list[dict[str, Any]] = [
        {"level": 2 if dp > 1 else 1, "reduce": "micro-batch", "offload": "optimizer"},
        {"level": 3, "reduce": "micro-batch", "offload": "optimizer"},
        {"level": 3, "reduce": "micro-batch", "offload": "parameters"},
    ]
    if dp == 1:
        return [{"level": 0}, *offloaded]
    level3 = [
        {"level": 3, "reduce": reduce, "keep_gathered": keep}
        for keep in (False, True)
        for reduce in ("step", "micro-batch")
    ]
    return [{"level": 0}, {"level": 1}, {"level": 2, "reduce": "micro-batch"}, *level3, *offloaded]
