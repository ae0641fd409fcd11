"""Activation bytes of a transformer by formula: what autograd keeps of its blocks, of the ends, and per pipeline stage.

Korthikanti et al. 2022 (arXiv:2205.05198, sections 4 and 5), for 16-bit activations and dropout masks of one byte, of
blocks of attention and an MLP of four times the width. With b sequences of s tokens in a micro-batch, width h, a heads
and tp = t, one block keeps

    recompute       tp                                  tp with sequence parallel
    none            s b h (10 + 24/t + 5 a s/(h t))     s b h/t (34 + 5 a s/h)
    selective       s b h (10 + 24/t)                   s b h/t 34                  scores are computed again
    full            2 s b h                             2 s b h/t                   its input alone

and attention that never keeps scores (flash) is as selective without computing anything twice. A run's own model is
counted by running it on paper; these are for a model of which only the sizes are known.

>>> gpt3 = Shape(layers=96, hidden=12288, heads=96, sequence=2048)
>>> round(1 - block(gpt3, recompute="selective") / block(gpt3), 2)
0.7
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a transformer: blocks, width, attention heads, tokens of a sequence, sequences of a micro-batch, and
    kinds of tokens."""

    layers: int
    hidden: int
    heads: int = 1
    sequence: int = 1
    micro_batch: int = 1
    vocabulary: int = 0

    @property
    def elements(self) -> int:
        """Of one activation of the model's width: s b h."""
        return self.sequence * self.micro_batch * self.hidden

    @property
    def parameters(self) -> float:
        """12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)) (Narayanan et al. 2021, equation 2)."""
        layers, hidden = self.layers, self.hidden
        outside = (self.vocabulary + self.sequence) / (12 * layers * hidden)
        return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + outside)


def block(
    shape: Shape,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    keeps_scores: bool = True,
) -> float:
    """Bytes that one block keeps of a micro-batch on each of `tp` ranks (table 2). keeps_scores: attention that is not
    flash or memory-efficient."""
    if recompute == "full":
        return 2 * shape.elements / (tp if sequence_parallel else 1)
    whole = 10 / tp if sequence_parallel else 10.0
    scores = _scores(shape) / tp if keeps_scores and recompute == "none" else 0.0
    return shape.elements * (whole + 24 / tp) + scores


def _scores(shape: Shape) -> float:
    """Softmax output, its dropout mask and dropout output: 5 a s^2 b bytes (section 4.1)."""
    return 5.0 * shape.heads * shape.sequence**2 * shape.micro_batch


def again(shape: Shape, *, tp: int = 1, sequence_parallel: bool = False, recompute: Recompute = "none") -> float:
    """Bytes that are there only while one block is computed again in backward, beside what `block` counts."""
    if recompute == "none":
        return 0.0
    whole = block(shape, tp=tp, sequence_parallel=sequence_parallel)
    return whole - block(shape, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute)


def ends(shape: Shape, *, tp: int = 1, sequence_parallel: bool = False, pp: int = 1) -> float:
    """Bytes outside the blocks on the first stage (section 4.3): masks of the embedding's dropout, of each of pp live
    micro-batches; and where it is the last stage too, the inputs of the last norm and of the head, and fp32 logits."""
    cut = tp if sequence_parallel else 1
    dropout = shape.elements * pp / cut
    if pp > 1:
        return dropout
    return dropout + 4 * shape.elements / cut + 4 * shape.sequence * shape.micro_batch * shape.vocabulary / tp


def live_blocks(
    layers: int, *, pp: int = 1, schedule: Schedule = "1f1b", chunks: int = 1, micro_batches: float = inf
) -> float:
    """Blocks times micro-batches whose activations the first stage's rank holds at most: blocks of a stage times

        gpipe           m
        1f1b            min(m, p)
        interleaved     min(m v, p v + p - 1), of v stages a rank

    (Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2.3: layers (1 + (p-1)/(p v))). Raises
    `ValueError` for gpipe without a number of micro-batches.

    >>> live_blocks(8, pp=4), live_blocks(8, pp=4, micro_batches=2)
    (8.0, 4.0)
    >>> live_blocks(8, pp=4, schedule="interleaved", chunks=2)
    11.0
    """
    if schedule == "interleaved":
        return layers / (pp * chunks) * min(micro_batches * chunks, pp * chunks + pp - 1)
    if schedule == "gpipe":
        if micro_batches == inf:
            raise ValueError("gpipe keeps all micro-batches of a step: how many are there?")
        return layers / pp * micro_batches
    return layers / pp * min(micro_batches, pp)


def first_stage(
    shape: Shape,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    keeps_scores: bool = True,
    pp: int = 1,
    schedule: Schedule = "1f1b",
    chunks: int = 1,
    micro_batches: float = inf,
    with_ends: bool = True,
) -> float:
    """Bytes of activations on each rank of the first stage, which holds the most. `with_ends`: with what is outside the
    blocks, which the paper's figures leave out."""
    one = block(shape, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute, keeps_scores=keeps_scores)
    live = live_blocks(shape.layers, pp=pp, schedule=schedule, chunks=chunks, micro_batches=micro_batches)
    return one * live + (ends(shape, tp=tp, sequence_parallel=sequence_parallel, pp=pp) if with_ends else 0)


def kept_outputs(shape: Shape, *, pp: int) -> int:
    """Bytes that a first stage saves which frees outputs once they are sent: 2 s b h p (appendix B)."""
    return 2 * shape.elements * pp


def checkpoints(shape: Shape, *, every: int = 1, parts: int = 1, width: int = 2) -> float:
    """Bytes of block inputs with full recompute, of each `every`-th block: 2 b s h l / every (ZeRO, section 3.2).

    parts: ranks of tp that keep a part of each (ZeRO's P_a, section 6.1); width: bytes of an element.
    """
    return width * shape.elements * shape.layers / (every * parts)


def rough(shape: Shape) -> int:
    """All activations by ZeRO's rule of thumb: 12 h b s l elements of 2 bytes (section 3.2, footnote)."""
    return 2 * 12 * shape.elements * shape.layers
