"""How long what moves over dp, and to and from the host, keeps a rank from computing; and the update. Pure.

A block is gathered while the one before it is computed, and reduced while the one after it is. Where both go on, each
slows the other: of the shorter time only `Rates.hidden` is won.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zero3d.planner.hardware import Cluster
from zero3d.planner.network import Group, collective
from zero3d.planner.run import Run
from zero3d.planner.speed import BYTES, PartSeconds
from zero3d.planner.workload import Part, Workload

IN_PLACE = 1 << 18
"""Elements, as `zero3d.linears` has them."""
MASTER_AND_MOMENTS = 12
"""Bytes that AdamW reads, and writes, of each parameter beside its weight and gradient."""


@dataclass(frozen=True)
class OverDp:
    """Of one rank."""

    cluster: Cluster
    workload: Workload
    run: Run

    def waits(self, parts: Sequence[Part], times: Sequence[PartSeconds]) -> tuple[float, float]:
        """Of each turn of a stage (forward, backward), beside what computing hides."""
        gathers = [self._gather(part) for part in parts]
        reductions = [self._turn_reduction(part) for part in parts]
        forwards = [one.forward.total for one in times]
        backwards = [one.whole_backward for one in times]
        nothing = [0.0] * len(parts)
        slowest = self._skew()
        return (
            self._wait(forwards, gathers, nothing) + slowest * sum(forwards),
            self._wait(backwards[::-1], gathers[::-1], reductions[::-1]) + slowest * sum(backwards),
        )

    def _wait(self, computing: Sequence[float], gathers: Sequence[float], reductions: Sequence[float]) -> float:
        if not self.run.software.overlap_dp:
            return sum(gathers) + sum(reductions)
        hidden, total = self.cluster.device.rates.hidden, gathers[0]
        for at, seconds in enumerate(computing):
            meanwhile = (gathers[at + 1] if at + 1 < len(gathers) else 0.0) + (reductions[at - 1] if at else 0.0)
            total += meanwhile - hidden * min(seconds, meanwhile)
        return total + reductions[-1]

    def _skew(self) -> float:
        """Of what is computed: waits for the slowest rank at gathers, which no rank begins alone."""
        if self.run.level < 3 or self._group.size == 1:
            return 0.0
        return self.cluster.device.rates.skew / self._passes

    @property
    def _passes(self) -> int:
        """That a gather is for."""
        return 2 * self.run.micro_batches if self.run.keep_gathered else 1

    def _gather(self, part: Part) -> float:
        run = self.run
        if run.level < 3 or not part.numel:
            return 0.0
        num_bytes = part.numel * BYTES[self.workload.dtype]
        over_dp = self._over_dp("all_gather", num_bytes) / self._passes
        if run.offload_parameters:
            over_dp = max(over_dp, num_bytes / self._group.size / self.cluster.host.copy_rate)
        return over_dp

    def _turn_reduction(self, part: Part) -> float:
        if self.run.reduce == "step" or not part.trained:
            return 0.0
        return self._reduction(part.trained)

    def _reduction(self, trained: float) -> float:
        run = self.run
        seconds = self._over_dp("reduce_scatter", trained * run.travel)
        if run.replicas > 1:
            across = Group(run.replicas, self._group.size * self.workload.tp)
            seconds += collective(self.cluster, across, "all_reduce", 4 * trained / self._group.size)
        return seconds

    def reductions(self, trained: float, backward: float) -> float:
        """Once a step, of what is not reduced in each turn."""
        run = self.run
        seconds = self._reduction(trained) if run.reduce == "step" else 0.0
        if run.level == 0:
            seconds += self._over_dp("all_gather", trained * run.travel)
        return self._beside(seconds, backward)

    def publishing(self, trained: float, forward: float) -> float:
        """Of new weights."""
        if self.run.level not in (1, 2):
            return 0.0
        seconds = self._over_dp("all_gather", trained * BYTES[self.workload.dtype])
        return self._beside(seconds, forward)

    def _beside(self, seconds: float, computing: float) -> float:
        """Seconds of traffic that nothing hides."""
        if not self.run.software.overlap_dp:
            return seconds
        return seconds - self.cluster.device.rates.hidden * min(seconds, computing)

    def adding(self, parts: Sequence[Part]) -> float:
        """Of each turn: gradients are added to the sums that are held. Products of large weights do that themselves
        where sums are kept beside them, in the weights' dtype (`zero3d.linears`)."""
        run, width = self.run, BYTES[self.workload.dtype]
        if run.micro_batches == 1 or run.software.fused_sums:
            return 0.0
        ranks = self._group.size if run.level >= 2 and run.reduce != "step" else 1
        trained = sum(part.trained for part in parts) / ranks
        if run.reduce == "step" and width == run.held:
            trained -= sum(part.trained_by_products(IN_PLACE) for part in parts)
        return self.cluster.device.streamed(trained * (width + 2 * run.held))

    def update(self, trained: float, backward: float, step: float) -> tuple[float, float]:
        """(on the device, on the host and to and from it, as far as nothing hides it)."""
        run, host = self.run, self.cluster.host
        mine = trained if run.level == 0 else trained / self._group.size
        weight = BYTES[self.workload.dtype]
        gone, here = mine * run.offload, mine * (1 - run.offload)
        on_device = self.cluster.device.streamed(mine * run.held + here * (run.held + 2 * MASTER_AND_MOMENTS + weight))
        down = gone * weight * (run.micro_batches if run.reduce == "micro-batch" else 1) / host.copy_rate
        ranks = min(self.cluster.per_node, run.dp * run.pp * self.workload.tp)
        updating = max(gone * ranks / host.update, gone * weight / host.copy_rate)
        waits = max(0.0, down - backward * run.micro_batches)
        return on_device, waits + (max(0.0, updating - step) if run.delayed_update else updating)

    @property
    def _group(self) -> Group:
        return Group(self.run.dp // self.run.replicas, self.workload.tp)

    def _over_dp(self, verb: str, num_bytes: float) -> float:
        return collective(self.cluster, self._group, verb, num_bytes, one_ring=self.run.software.one_ring)
