"""What one tensor-parallel rank computes, reads and sends for one sample, before anything is known of its speed. Pure.

A model is cut into parts: what comes before its blocks, its blocks, and what comes after. Blocks that are alike are one
kind, and counted once. `dryrun/count.py` counts all this by running the model on tensors without data.

Amounts are a constant and so much for each sample of a micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

FUSED_FORWARD, FUSED_BACKWARD = 4, 10
"""FLOPs of fused attention, by B H T S D: two products, and five in backward, where the first is made once more."""


@dataclass(frozen=True)
class Amount:
    """`fixed` + samples * `each`."""

    each: float = 0.0
    fixed: float = 0.0

    def of(self, samples: float) -> float:
        return self.fixed + samples * self.each

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.each + other.each, self.fixed + other.fixed)


@dataclass(frozen=True)
class Product:
    """`times` products of an [m, k] and a [k, n] matrix, for one sample. m is the dim that grows with the samples,
    whichever of the three it is; where there are several products in a batch `times` may grow in its place."""

    m: float
    n: float
    k: float
    times: float = 1.0
    batched: bool = False
    """`times`, not m, grows with the samples: products of activations with each other."""

    def flops(self, samples: float) -> float:
        return 2 * self.m * self.n * self.k * self.times * samples

    def shape(self, samples: float) -> tuple[float, float, float, float]:
        """(m, n, k, times) for a micro-batch of so many samples."""
        if self.batched:
            return self.m, self.n, self.k, self.times * samples
        return self.m * samples, self.n, self.k, self.times


@dataclass(frozen=True)
class Call:
    """A call over tp. num_bytes: of the whole tensor that it fills or sums; behind: FLOPs of products that run, for a
    sample, while it is under way."""

    verb: str
    num_bytes: Amount
    behind: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The forward of a part, or its backward without the gradients of weights.

    products: with weights; attention: of activations with each other, where attention is not fused
    fused: FLOPs of fused attention for a sample, as if every position saw all others; fused_done: those it really does
    attention_moved: bytes that other operations on attention scores read and write; moved: those of all others
    launches: operations that take a kernel; calls: over tp
    """

    products: Sequence[Product] = ()
    attention: Sequence[Product] = ()
    fused: float = 0.0
    fused_done: float = 0.0
    attention_moved: Amount = Amount()
    moved: Amount = Amount()
    launches: int = 0
    calls: Sequence[Call] = ()

    def flops(self, samples: float) -> float:
        """As papers count them: all of the attention matrix."""
        return sum(one.flops(samples) for one in (*self.products, *self.attention)) + self.fused * samples


@dataclass(frozen=True)
class Rise:
    """What is held, from one moment of a pass to another.

    tops: bytes more than at the start of the pass, at all moments that can be the highest
    gradient: parameter whose gradient then arrives; "" at the end of the pass
    """

    tops: tuple[Amount, ...]
    gradient: str = ""


@dataclass(frozen=True)
class Course:
    """What a forward or a backward of a part holds as it goes on, gradients of parameters after their arrival apart.

    net: bytes more at its end than at its start
    """

    rises: tuple[Rise, ...] = ()
    net: Amount = Amount()


@dataclass(frozen=True)
class Parameter:
    """A parameter as one tensor-parallel rank holds it, before ZeRO shards it.

    name: the model's own; of a block's without the block's path. multiplied: it is not an embedding's
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    multiplied: bool = True

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A block of some kind, or all that comes before or after the blocks.

    backward: without the gradients of weights, which are `weights`
    for_weights: bytes of what these are made of; an input of several products counts once
    parameters: in the model's order, each where it is first used; borrowed: those of other parts that it uses too
    saved: bytes that autograd keeps for the backward; a tensor counts where it is first kept
    attention_saved: of these, what recomputing the inner part of attention spares
    entering, leaving: bytes of the tensors that come from the part before and go to the next; entering_saved: of the
    first, those that autograd keeps
    courses: (forward, backward) by `recompute.mode`; of_one: of a single sample, where several are not on its line
    buffers: bytes of buffers of its modules
    """

    name: str
    forward: Pass = Pass()
    backward: Pass = Pass()
    weights: Sequence[Product] = ()
    for_weights: Amount = Amount()
    parameters: Sequence[Parameter] = ()
    borrowed: Sequence[Parameter] = ()
    saved: Amount = Amount()
    attention_saved: Amount = Amount()
    entering: Amount = Amount()
    entering_saved: Amount = Amount()
    leaving: Amount = Amount()
    courses: Mapping[str, tuple[Course, Course]] = field(default_factory=dict)
    of_one: Mapping[str, tuple[Course, Course]] = field(default_factory=dict)
    buffers: int = 0

    @cached_property
    def trained(self) -> int:
        """Elements."""
        return sum(one.numel for one in self.parameters if one.trainable)

    @cached_property
    def frozen(self) -> int:
        return sum(one.numel for one in self.parameters if not one.trainable)

    @property
    def numel(self) -> int:
        return self.trained + self.frozen

    @cached_property
    def multiplied(self) -> int:
        """Elements by which stages are cut: an embedding is looked up, not multiplied with."""
        return sum(one.numel for one in (*self.parameters, *self.borrowed) if one.multiplied)

    def trained_by_products(self, least: int) -> int:
        """Elements of its own trained weights that are multiplied with, each of `least` or more."""
        return sum(one.numel for one in self.parameters if one.trainable and one.multiplied and one.numel >= least)


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A model on one of `tp` ranks. kinds: of blocks; order: the kind of each block, as the model runs them.

    tokens: of one sample; dtype: of weights and activations; tp_buffers: -> bytes of the tp axis' own that live over
    steps, once a course was asked for
    path: of the list of blocks; ends: the first and the last block, where they are not as others of their kind are
    """

    name: str
    tp: int
    sequence_parallel: bool
    tokens: int
    dtype: str
    before: Part
    kinds: Sequence[Part]
    order: Sequence[int]
    after: Part
    tp_buffers: Callable[[], Amount] = Amount
    path: str = ""
    ends: Sequence[Part] = ()

    @property
    def blocks(self) -> list[Part]:
        return [self.kinds[kind] for kind in self.order]

    @property
    def parts(self) -> list[Part]:
        """All, in order."""
        return [self.before, *self.blocks, self.after]

    @property
    def trained(self) -> int:
        """Trained elements of a rank that has all stages."""
        return sum(part.trained for part in self.parts)

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)
