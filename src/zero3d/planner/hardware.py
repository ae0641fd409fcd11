"""What a planned run is to run on: devices, the links between them, the host of each machine. Pure.

Peaks are the makers' own figures. What is reached of them is in `Rates`, one set for each kind of device: of the
presets fitted once to all published runs of that kind (docs/planner.md), of a profile what `zero3d calibrate` has
measured. A profile is a `Cluster` as JSON.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zero3d.errors import UsageError

Amount = Annotated[float, Field(ge=1, le=1e24)]
"""Bytes, or how much of something in a second."""
Part = Annotated[float, Field(ge=1e-6, le=1)]
NotNegative = Annotated[float, Field(ge=0, le=1e6)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class Fact(BaseModel):
    """Values that do not change, of known names alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DtypeRates(Fact):
    """What is reached in one dtype, as `Rates` has it."""

    half: NotNegative
    attention: Part
    moving: Part


class Rates(Fact):
    """What is reached of a device's peaks."""

    matrix: Part
    """Of the peak FLOP/s, by a product of large matrices."""
    half: NotNegative
    """A product of dims m, n, k reaches `matrix` / ((1 + half/m) (1 + half/n) (1 + half/k))."""
    attention: Part
    """Of the peak FLOP/s, by fused attention such as FlashAttention-2."""
    moving: Part
    """Of the memory bandwidth, by operations that are not products."""
    by_dtype: Mapping[str, DtypeRates] = {}
    """`half`, `attention` and `moving` in a dtype where they are known to be others: what computes products of 16 bits
    fast may be of no use to anything else."""
    streaming: Part | None = None
    """Of the memory bandwidth, by passes over buffers that are there already, as an update makes; None: as `moving`."""
    link: Part
    """Of a link's bandwidth, by large collectives."""
    pair: Part
    """Of a link's bandwidth, by a message from one rank to another."""
    hop: NotNegative
    """Seconds that such a message takes at the least, with posting it on both sides."""
    hidden: Part
    """Of the time that computing and traffic overlap, what is won by that: both want memory and multiprocessors."""
    skew: NotNegative = 0.0
    """Of what ranks compute between calls that all of them wait in: what they wait there for the slowest."""

    def of(self, dtype: str) -> DtypeRates:
        common = DtypeRates(half=self.half, attention=self.attention, moving=self.moving)
        return self.by_dtype.get(dtype, common)


class Device(Fact):
    """One accelerator, or the cores that one rank computes on."""

    name: str
    flops: Annotated[Mapping[str, Amount], Field(min_length=1)]
    """Peak FLOP/s, dense, by the dtype of a product's inputs: fp32, fp16, bf16, fp8."""
    memory: Amount
    """Bytes."""
    bandwidth: Amount
    """Of its memory, bytes/s."""
    launch: NotNegative
    """Seconds that a kernel takes at the least."""
    rates: Rates

    def moved(self, num_bytes: float, dtype: str | None = None) -> float:
        """Seconds in which operations on `dtype`, or whatever fast ones, that are no products read and write
        `num_bytes`."""
        moving = self.rates.of(dtype).moving if dtype else self.rates.moving
        return num_bytes / (self.bandwidth * moving)

    def streamed(self, num_bytes: float) -> float:
        """Seconds in which `num_bytes` of buffers that stay are read and written."""
        return num_bytes / (self.bandwidth * (self.rates.streaming or self.rates.moving))

    def peak(self, dtype: str) -> float:
        """FLOP/s of products in `dtype`. Raises `UsageError` for one that the device has no figure for."""
        if dtype not in self.flops:
            raise UsageError(
                f"nothing is known of products in {dtype} on {self.name}",
                hint=f"There are figures for {', '.join(self.flops)}.",
            )
        return self.flops[dtype]


class Link(Fact):
    """Between one rank and another."""

    latency: NotNegative
    """Seconds of a message without content."""
    bandwidth: Amount
    """Bytes/s of one rank in one direction."""


class Host(Fact):
    """The machine that a node's devices are in."""

    memory: Amount
    """Bytes."""
    cores: Count
    update: Amount
    """Parameters/s that all cores together update by AdamW."""
    copy_rate: Amount
    """Bytes/s between one device and the host's memory, in one direction."""


class Cluster(Fact):
    """Nodes that are alike. inside: between devices of one node; across: between nodes, a device's share of it."""

    device: Device
    per_node: Count
    inside: Link
    across: Link
    host: Host
    spread: NotNegative = 0.0
    """Of a profile: how far repeated timings were apart, of their median."""

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `UsageError` that names the keys which are missing, unknown or wrong."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'profile'}: {one['msg']}" for one in error.errors())
            raise UsageError(f"this is no profile of a cluster: {told}", hint="zero3d calibrate writes one.") from None

    def with_changes(self, **changes: Any) -> Self:
        """The same with other values of its own fields, checked."""
        return self.model_validate({**dict(self), **changes})


GB, TFLOP = 1e9, 1e12

AMPERE = Rates(matrix=0.78, half=64, attention=0.55, moving=0.75, link=0.8, pair=0.33, hop=2.5e-4, hidden=0.5)
HOPPER = Rates(matrix=0.65, half=64, attention=0.3, moving=0.65, link=0.8, pair=0.33, hop=2.5e-4, hidden=0.45)


def _dgx(device: Device, inside: float, across: float, host: Host, *, per_node: int = 8) -> Cluster:
    """`inside`, `across`: GB/s of one device in one direction."""
    return Cluster(
        device=device,
        per_node=per_node,
        inside=Link(latency=5e-6, bandwidth=inside * GB),
        across=Link(latency=1e-5, bandwidth=across * GB),
        host=host,
    )


# Two sockets at 256 GB/s update 3.9e9 parameters/s (ZeRO-Offload, table 4: 10e9 in 2.57 s); others by their memory's
# bandwidth. Copies reach some 0.8 of PCIe x16: 16 GB/s in its third version, 32 in its fourth, 64 in its fifth.
DDR4_2666 = Host(memory=1.5e12, cores=48, update=3.9e9, copy_rate=12 * GB)
DDR4_3200 = Host(memory=1e12, cores=128, update=6.2e9, copy_rate=25 * GB)
DDR5_4800 = Host(memory=2e12, cores=112, update=9.3e9, copy_rate=50 * GB)

V100 = Device(
    name="V100-32GB",
    # Tesla V100 datasheet (SXM3): 125 TFLOP/s fp16 with fp32 sums, 15.7 fp32; HBM2 at 900 GB/s.
    flops={"fp32": 15.7 * TFLOP, "fp16": 125 * TFLOP},
    memory=32 * 2**30,
    bandwidth=900 * GB,
    launch=4e-6,
    # Near Shoeybi et al. 2019, section 5.1 (39 TFLOP/s), ZeRO-Offload, figure 8, and ZeRO-Infinity, figure 5.
    rates=Rates(matrix=0.47, half=64, attention=0.30, moving=0.65, link=0.75, pair=0.33, hop=2.5e-4, hidden=0.5),
)
A100_40 = Device(
    name="A100-40GB",
    # A100 whitepaper, table 4: 312 TFLOP/s bf16 and fp16, 19.5 fp32 (156 with tf32 products); HBM2 at 1555 GB/s.
    flops={"fp32": 19.5 * TFLOP, "tf32": 156 * TFLOP, "fp16": 312 * TFLOP, "bf16": 312 * TFLOP},
    memory=40 * 2**30,
    bandwidth=1555 * GB,
    launch=4e-6,
    rates=AMPERE,
)
# A100 datasheet (SXM, 80 GB): HBM2e at 2039 GB/s.
A100_80 = A100_40.model_copy(update={"name": "A100-80GB", "memory": 80 * 2**30, "bandwidth": 2039 * GB})
H100 = Device(
    name="H100-80GB",
    # H100 datasheet (SXM5), dense: 989 TFLOP/s bf16 and fp16, 1979 fp8, 67 fp32 (495 tf32); HBM3 at 3350 GB/s.
    flops={
        "fp32": 67 * TFLOP,
        "tf32": 495 * TFLOP,
        "fp16": 989 * TFLOP,
        "bf16": 989 * TFLOP,
        "fp8": 1979 * TFLOP,
    },
    memory=80 * 2**30,
    bandwidth=3350 * GB,
    launch=4e-6,
    rates=HOPPER,
)
H100_96 = H100.model_copy(
    update={
        "name": "H100-96GB-500W",
        # torchtitan benchmarks/llama3_h100_202412_torchtitan.md: 96 GB of HBM2e at 2.4 TB/s, 500 W in place of 700 W.
        "memory": 96 * 2**30,
        "bandwidth": 2400 * GB,
        "rates": HOPPER.model_copy(update={"matrix": 0.58}),
    }
)
# H200 datasheet: the chip of the H100, 141 GB of HBM3e at 4.8 TB/s.
H200 = H100.model_copy(update={"name": "H200", "memory": 141e9, "bandwidth": 4800 * GB})
CPU = Device(
    name="CPU",
    # One core of a server with AVX2 at 3 GHz: two fused multiply-adds of 8 fp32 a cycle; bf16 is widened first.
    flops={"fp32": 96e9, "bf16": 48e9, "fp16": 48e9},
    memory=4e9,
    bandwidth=10 * GB,
    launch=5e-6,
    rates=Rates(matrix=0.7, half=16, attention=0.3, moving=0.7, link=0.7, pair=0.7, hop=2e-4, hidden=0.3),
)

PRESETS: Mapping[str, Cluster] = {
    # DGX-2 datasheet: 16 devices, NVSwitch 150 GB/s each way, 8 InfiniBand ports of 100 Gb/s, 1.5 TB, 48 cores.
    "V100-32GB": _dgx(V100, 150, 6.25, DDR4_2666, per_node=16),
    # DGX A100 datasheet: 8 devices, NVLink 300 GB/s each way, 8 ports of 200 Gb/s; Selene is built of these.
    "A100-40GB": _dgx(A100_40, 300, 25, DDR4_3200),
    "A100-80GB": _dgx(A100_80, 300, 25, DDR4_3200.model_copy(update={"memory": 2e12})),
    # DGX H100 datasheet: NVLink 450 GB/s each way, 8 ports of 400 Gb/s, 2 TB, 112 cores.
    "H100-80GB": _dgx(H100, 450, 50, DDR5_4800),
    "H100-96GB-500W": _dgx(H100_96, 450, 50, DDR5_4800),
    "H200": _dgx(H200, 450, 50, DDR5_4800),
    "CPU": Cluster(
        device=CPU,
        per_node=8,
        inside=Link(latency=5e-5, bandwidth=2 * GB),
        across=Link(latency=1e-4, bandwidth=0.125 * GB),
        host=Host(memory=32e9, cores=8, update=2e8, copy_rate=5 * GB),
    ),
}
ALIASES = {"DGX-2": "V100-32GB", "V100": "V100-32GB", "SELENE": "A100-80GB", "A100": "A100-80GB", "H100": "H100-80GB"}


def is_preset(cluster: Cluster) -> bool:
    """Whether its device is one of the makers' figures, rather than a profile's."""
    return any(cluster.device == one.device for one in PRESETS.values())


def find(name: str) -> Cluster:
    """The preset of that name, in any case, or the profile in the file `name` (.json).

    Raises `UsageError` for an unknown name, with the nearest ones, and for a file that is no profile.
    """
    if name.endswith(".json"):
        try:
            return Cluster.from_json(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{name} cannot be read: {error.strerror}", hint="zero3d calibrate writes one.") from None
        except UnicodeDecodeError:
            raise UsageError(f"{name} is not UTF-8 text", hint="zero3d calibrate writes a profile.") from None
    known = {key.upper(): key for key in PRESETS} | ALIASES
    if name.upper() in known:
        return PRESETS[known[name.upper()]]
    near = [known[one] for one in get_close_matches(name.upper(), known, n=3, cutoff=0.4)]
    meant = f"Did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    raise UsageError(
        f"there is no device {name!r}",
        hint=f"{meant}Known: {', '.join(PRESETS)}, or the .json file of a profile that zero3d calibrate has written.",
    )
