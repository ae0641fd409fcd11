"""How long one rank computes: a part of a workload, forward and backward, for a micro-batch of some samples. Pure.

product of weights     FLOPs / (peak * `matrix` / ((1 + half/m) (1 + half/n) (1 + half/k))), or what its bytes take
fused attention        FLOPs that are really done / (peak * `attention`)
all else               bytes read and written / (bandwidth * `moving`), and a launch for each operation
                       (`half`, `attention` and `moving` of the dtype, where they are known to be others)
calls over tp          what the network takes and computing does not hide, and `skew` of the computing between them
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zero3d.planner.hardware import Cluster
from zero3d.planner.network import Group, collective
from zero3d.planner.workload import Part, Pass, Product

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
QUANTISED = 3
"""Bytes that an element of a product's inputs costs to be brought to fp8: read twice in part, written once."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """Which part of a block's forward is computed once more in backward."""

    products: float = 0.0
    attention: float = 0.0
    moving: float = 0.0
    tp: float = 0.0


RECOMPUTE: Mapping[str, Again] = {
    "none": Again(),
    "block": Again(products=1, attention=1, moving=1, tp=1),
    # The inner part of attention alone (Korthikanti et al. 2022, section 5).
    "attention": Again(attention=1),
}


@dataclass(frozen=True, kw_only=True)
class Software:
    """How a program runs a model, where that is not as zero3d does.

    products: dtype of products of weights, where it is not that of the weights
    compiled: elementwise operations that follow each other are one kernel
    fused_sums: products add gradients of weights to the sums that are held
    overlap_dp: what moves over dp does while the device computes
    overlap_tp: so do calls over tp, as far as the model's cut lets them; async_tp: all of them
    attention: speed of its fused attention, of FlashAttention-2's (Dao 2023)
    one_ring: see `network.collective`; scattered: tensor-parallel ranks each send a part of what a stage sends
    """

    products: str | None = None
    compiled: bool = False
    fused_sums: bool = False
    overlap_dp: bool = True
    overlap_tp: bool = True
    async_tp: bool = False
    attention: float = 1.0
    one_ring: bool = False
    scattered: bool = False


@dataclass(frozen=True)
class Seconds:
    """Of a pass, by cause."""

    products: float = 0.0
    attention: float = 0.0
    moving: float = 0.0
    tp: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.moving + self.tp

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.products + other.products,
            self.attention + other.attention,
            self.moving + other.moving,
            self.tp + other.tp,
        )

    def again(self, share: Again) -> "Seconds":
        return Seconds(
            self.products * share.products,
            self.attention * share.attention,
            self.moving * share.moving,
            self.tp * share.tp,
        )


@dataclass(frozen=True)
class PartSeconds:
    """forward, backward: without what is computed again and gradients of weights; again: in backward; weights"""

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()
    again: Seconds = Seconds()
    weights: Seconds = Seconds()

    def __add__(self, other: "PartSeconds") -> "PartSeconds":
        return PartSeconds(
            self.forward + other.forward,
            self.backward + other.backward,
            self.again + other.again,
            self.weights + other.weights,
        )

    @property
    def whole_backward(self) -> float:
        return self.backward.total + self.again.total + self.weights.total


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of one rank of `tp` that computes in `dtype`."""

    cluster: Cluster
    dtype: str
    tp: int
    software: Software = Software()

    def part(self, part: Part, samples: float, again: Again = RECOMPUTE["none"]) -> PartSeconds:
        """Of a micro-batch of `samples`."""
        forward = self.of_pass(part.forward, samples)
        gradients = self._products(part.weights, samples)
        weights = Seconds(products=gradients, tp=self._skew(gradients) if part.backward.calls else 0.0)
        return PartSeconds(forward, self.of_pass(part.backward, samples), forward.again(again), weights)

    def of_pass(self, one: Pass, samples: float) -> Seconds:
        attention = self._attention(one, samples)
        device, kept = self.cluster.device, COMPILED if self.software.compiled else 1.0
        products = self._products(one.products, samples)
        moving = self._others(one.moved.of(samples) * kept) + one.launches * kept * device.launch
        calls = self._calls(one, samples, products)
        if one.calls:
            calls += self._skew(products + attention.attention + moving)
        return Seconds(products, attention.attention, moving, calls)

    def _attention(self, one: Pass, samples: float) -> Seconds:
        device = self.cluster.device
        reached = device.rates.of(self.dtype).attention * self.software.attention
        fused = one.fused_done * samples / (device.peak(self.dtype) * reached)
        unfused = sum(self._product(product, samples, self.dtype) for product in one.attention)
        return Seconds(attention=fused + unfused + self._others(one.attention_moved.of(samples)))

    def _products(self, products: Iterable[Product], samples: float) -> float:
        dtype = self.software.products or self.dtype
        return sum(self._product(product, samples, dtype) for product in products)

    def _product(self, product: Product, samples: float, dtype: str) -> float:
        device = self.cluster.device
        m, n, k, times = product.shape(samples)
        half = device.rates.of(dtype).half
        reached = device.rates.matrix / ((1 + half / m) * (1 + half / n) * (1 + half / k))
        flops = 2 * m * n * k / (device.peak(dtype) * reached)
        elements = m * n + m * k + n * k
        seconds = max(flops, device.moved(elements * BYTES[self.dtype]))
        if BYTES[dtype] < BYTES[self.dtype]:
            seconds += device.moved((m * k + n * k) * QUANTISED)
        return seconds * times

    def _others(self, num_bytes: float) -> float:
        """Seconds of operations that are no products."""
        return self.cluster.device.moved(max(num_bytes, 0.0), self.dtype)

    def _skew(self, computing: float) -> float:
        return self.cluster.device.rates.skew * computing

    def _calls(self, one: Pass, samples: float, products: float) -> float:
        """Seconds of calls over tp that nothing hides; `products`: of the pass."""
        device, group = self.cluster.device, Group(self.tp)
        rate = device.peak(self.software.products or self.dtype) * device.rates.matrix
        total = 0.0
        for call in one.calls:
            seconds = collective(self.cluster, group, call.verb, call.num_bytes.of(samples))
            if self.software.async_tp:
                behind = products / len(one.calls)
            elif self.software.overlap_tp:
                behind = call.behind * samples / rate
            else:
                behind = 0.0
            total += seconds - device.rates.hidden * min(seconds, behind)
        return total


COMPILED = 0.4
"""Of the bytes that operations move one by one, what is left where a compiler joins them."""
