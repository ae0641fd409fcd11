"""What was measured, as values: curves, and how much work they are worth. Pure.

All seconds are the median of the slowest rank while all ranks do the same, as in a step of training.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

FEW_SECONDS = 5.0
Progress = Callable[[str, float], None]
"""Called with what is measured next and the part that is done."""
Verb = Literal["send", "all-gather", "reduce-scatter"]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How large what is measured is, and how long each number may take.

    seconds: of all numbers together, about. dims: of square matrices; skinny: rows of a product with the largest dim
    that few tokens make. messages: bytes. elements: of arrays that are read and written, and updated by AdamW.
    On a CPU, whose caches and allocator make much of it: tokens: of a sequence that attention is over; given: elements
    of what an operation of a model gives, and held: of all that is kept for a while.
    """

    seconds: float = 20.0
    dims: tuple[int, ...] = (64, 128, 256, 512, 1024)
    skinny: tuple[int, ...] = (16, 128)
    messages: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)
    elements: int = 1 << 23
    tokens: int = 256
    given: int = 1 << 18
    held: int = 1 << 26
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    longest: float = 1.0
    """Seconds: larger products of a dtype that would take so long are left out."""

    @classmethod
    def within(cls, seconds: float) -> "Effort":
        """The usual one, or where it has few seconds one without the largest of all sizes."""
        usual = cls(seconds=seconds)
        if seconds >= FEW_SECONDS:
            return usual
        return replace(usual, dims=usual.dims[:-2], messages=usual.messages[:-1], elements=usual.elements // 8)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product [m, k] x [k, n] of one rank. flops: 2 m n k a second."""

    dtype: str
    m: int
    n: int
    k: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class Message:
    """One call in groups of `ranks`. sent: bytes that leave a rank. across: between nodes."""

    verb: Verb
    ranks: int
    sent: int
    seconds: float
    across: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it was measured. memory, host_memory: bytes of a rank's device and of a node; threads: of each rank."""

    device: str
    kind: Literal["cpu", "cuda"]
    world: int
    per_node: int
    threads: int
    cores: int
    memory: float
    host_memory: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All numbers: of one rank, but for `update`, which is of all ranks of a node together.

    By dtype: attention: FLOP/s of fused attention, forward and backward; moving: bytes/s of norms and activation
    functions, both ways. stream: bytes/s of a sum of two large arrays; launch: seconds of the smallest operation, with
    autograd; update: parameters/s of AdamW on the host; copy: bytes/s from device to host; skew: what ranks wait in
    calls for the slowest of them, of the time that they compute; 0 of one rank. spread: of repeated timings, the median
    of (upper - lower quartile) / median.
    """

    machine: Machine
    products: tuple[Product, ...]
    attention: Mapping[str, float]
    moving: Mapping[str, float]
    stream: float
    launch: float
    messages: tuple[Message, ...]
    update: float
    copy: float
    skew: float
    spread: float

    def as_tree(self) -> Mapping[str, Any]:
        """As JSON has it."""
        return asdict(self)
