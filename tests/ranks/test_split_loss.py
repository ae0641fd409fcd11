"""Cross entropy of split logits, of whole ones, and of plain torch.

Bit-equal: the loss on all ranks. Close, 1e-6 and the rounding of the logits' dtype: loss and gradient, to autograd in
fp64. Random cases, the same in every run; `--hypothesis-profile=long` tries new ones.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zero3d
from tests.world import run_ranks
from zero3d.comm.mesh import open_mesh
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.layout import Layout
from zero3d.models import losses
from zero3d.tensor.loss import SplitLogits, cross_entropy

pytestmark = pytest.mark.ranks

EACH = 8
"""Cases in one example of hypothesis: forking ranks costs more than computing them."""
OUTER = 0.5
"""What comes to the loss in backward; a power of two rounds nothing."""


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    shape: tuple[int, ...]
    vocabulary: int
    more_padding: int
    scale: float
    masked: float
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk: int

    @property
    def options(self) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
        }

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Whole logits and targets."""
        generator = torch.Generator().manual_seed(self.vocabulary)
        logits = torch.randn(*self.shape, self.vocabulary, generator=generator) * self.scale
        targets = torch.randint(self.vocabulary, self.shape, generator=generator)
        targets[torch.rand(self.shape, generator=generator) < self.masked] = self.ignore_index
        return logits.to(self.dtype), targets


@dataclass(frozen=True)
class Found:
    loss: Tensor
    count: Tensor
    gradient: Tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16))),
        shape=tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=2))),
        vocabulary=draw(st.integers(1, 40)),
        more_padding=draw(st.integers(0, 3)),
        scale=draw(st.sampled_from((0.0, 1.0, 10.0))),
        masked=draw(st.sampled_from((0.0, 0.3, 1.0))),
        ignore_index=draw(st.sampled_from((-100, -1, 0, 3, 1000))),
        label_smoothing=draw(st.sampled_from((0.0, 0.0, 0.1, 1.0))),
        z_loss=draw(st.sampled_from((0.0, 0.0, 1e-4, 0.1))),
        chunk=draw(st.sampled_from((1, 30, 1 << 21))),
    )


def expected(case: Case) -> Found:
    """Plain torch in fp64."""
    narrow, targets = case.numbers()
    logits = narrow.double().requires_grad_()
    flat, counted = logits.flatten(0, -2), targets.flatten() != case.ignore_index
    total = F.cross_entropy(
        flat,
        targets.flatten(),
        ignore_index=case.ignore_index,
        label_smoothing=case.label_smoothing,
        reduction="sum",
    )
    total = total + case.z_loss * flat[counted].logsumexp(-1).square().sum()
    (gradient,) = torch.autograd.grad(total, logits, torch.full_like(total, OUTER))
    return Found(total.detach(), counted.sum(), gradient)


def tp_axis() -> RecordedAxis:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return open_mesh(Layout(tp=ranks), timedelta(seconds=20)).axes["tp"]


def split(logits: Tensor, axis: RecordedAxis, more_padding: int = 0) -> SplitLogits:
    """My columns as a leaf; padding is not a number, so that none of it may count."""
    vocabulary = logits.size(-1)
    width = -(-vocabulary // axis.size) + more_padding
    padded = F.pad(logits, (0, width * axis.size - vocabulary), value=float("nan"))
    local = padded[..., axis.index * width : (axis.index + 1) * width].clone()
    return SplitLogits(local.requires_grad_(), vocabulary, axis)


def found_on_rank(some: list[Case]) -> list[tuple[Found, Found]]:
    """Of whole and of split logits; of the latter all columns' gradient, padding counted."""
    axis, found = tp_axis(), []
    for case in some:
        losses.CHUNK = case.chunk  # in this process alone, which ends with its work
        logits, targets = case.numbers()
        whole = logits.requires_grad_()
        parts = split(logits.detach(), axis, case.more_padding)
        both = []
        for given_logits, leaf in ((whole, whole), (parts, parts.local)):
            loss, count = cross_entropy(given_logits, targets, **case.options)
            sent = axis.sent_bytes
            loss.backward(torch.full_like(loss, OUTER))
            assert axis.sent_bytes == sent and leaf.grad is not None
            both.append(Found(loss.detach(), count, leaf.grad))
        found.append((both[0], both[1]))
    return found


def hold(some: list[Case], ranks: int) -> None:
    by_rank = run_ranks(ranks, found_on_rank, some)
    for number, case in enumerate(some):
        reference = expected(case)
        whole = by_rank[0][number][0]
        parts = [of_rank[number][1] for of_rank in by_rank]
        assert all(torch.equal(part.loss, parts[0].loss) for part in parts), case
        gradient = torch.cat([part.gradient for part in parts], -1)
        assert not gradient[..., case.vocabulary :].any(), case
        for loss, count, mine in (
            (whole.loss, whole.count, whole.gradient),
            (parts[0].loss, parts[0].count, gradient[..., : case.vocabulary]),
        ):
            assert loss.dtype == torch.float32 and mine.dtype == case.dtype and count == reference.count, case
            torch.testing.assert_close(loss.double(), reference.loss, rtol=1e-6, atol=1e-6, msg=str(case))
            rounding = 1e-6 if case.dtype == torch.float32 else torch.finfo(case.dtype).eps
            torch.testing.assert_close(mine.double(), reference.gradient, rtol=rounding, atol=1e-6, msg=str(case))


@settings(deadline=None)  # the number of examples is the profile's
@given(ranks=st.sampled_from((1, 2, 2, 4)), some=st.lists(cases(), min_size=EACH, max_size=EACH))
def test_split_equals_whole_equals_torch(ranks: int, some: list[Case]) -> None:
    hold(some, ranks)


def test_one_gather_a_chunk_of_three_or_four_numbers_a_row() -> None:
    def work() -> list[tuple[int, int, int]]:
        axis, told = tp_axis(), []
        losses.CHUNK = 160  # 4 rows of 40 columns here
        parts, targets = split(torch.randn(2, 5, 79), axis), torch.randint(79, (2, 5))
        for smoothing in (0.0, 0.1):
            axis.start_step()
            sent = axis.sent_bytes
            loss, _ = cross_entropy(parts, targets, label_smoothing=smoothing)
            loss.backward()
            gathers = [call for call in axis.calls if call.verb == "all_gather"]
            told.append((len(axis.calls), len(gathers), axis.sent_bytes - sent))
        return told

    assert run_ranks(2, work) == [[(3, 3, 10 * 3 * 4), (3, 3, 10 * 4 * 4)]] * 2


def test_whole_gathers_and_gives_back_the_gradient_of_my_columns() -> None:
    logits, targets = torch.randn(3, 7), torch.tensor([0, 6, 3])

    def work() -> tuple[Tensor, Tensor]:
        parts = split(logits, tp_axis())
        whole = parts.whole()
        F.cross_entropy(whole, targets).backward()
        assert whole.shape == parts.shape == (3, 7)
        return whole.detach(), parts.local.grad

    by_rank = run_ranks(4, work)
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, targets).backward()
    assert all(torch.equal(whole, logits) for whole, _ in by_rank)
    gradients = torch.cat([gradient for _, gradient in by_rank], -1)
    assert torch.allclose(gradients[:, :7], leaf.grad) and not gradients[:, 7:].any()


def test_far_from_zero_nothing_is_lost() -> None:
    """The loss depends on differences of logits alone: it is made of these, not of large numbers that cancel."""
    logits, targets = torch.randint(-8, 8, (6, 50)).float(), torch.randint(50, (6,))

    def work() -> list[float]:
        axis = tp_axis()
        return [
            float(cross_entropy(split(logits + offset, axis), targets, label_smoothing=0.2)[0])
            for offset in (0.0, 1e6, -1e6)
        ]

    (near, above, below), _ = run_ranks(2, work)
    assert above == pytest.approx(near, rel=1e-6) and below == pytest.approx(near, rel=1e-6)


def test_minus_infinity_excludes_a_class_and_other_non_finite_logits_show_on_every_rank() -> None:
    """A rank whose columns are all excluded has no largest logit of its own."""
    logits, targets = torch.randn(4, 8), torch.tensor([4, 5, 6, 7])
    logits[:, :4] = -torch.inf
    logits[1, 5] = torch.nan
    logits[2] = -torch.inf

    def work() -> list[tuple[Tensor, Tensor]]:
        found = []
        for row in range(4):
            parts = split(logits[row : row + 1], tp_axis())
            loss, _ = cross_entropy(parts, targets[row : row + 1], z_loss=0.1)
            loss.backward()
            found.append((loss.detach(), parts.local.grad))
        return found

    by_rank = run_ranks(2, work)
    for row in (0, 3):
        leaf = logits[row].clone().requires_grad_()
        reference = F.cross_entropy(leaf, targets[row]) + 0.1 * leaf.logsumexp(-1).square()
        reference.backward()
        gradient = torch.cat([of_rank[row][1][0] for of_rank in by_rank])
        assert all(torch.allclose(of_rank[row][0], reference) for of_rank in by_rank)
        # Autograd of torch's logsumexp has no gradient where a logit is -inf, and neither has the class.
        assert torch.allclose(gradient, leaf.grad.nan_to_num(), atol=1e-6)
    assert all(of_rank[row][0].isnan() for of_rank in by_rank for row in (1, 2))


def test_a_target_that_is_no_class_is_refused_on_every_rank() -> None:
    """Also where it is one of the padding columns, which one rank does have."""

    def work(target: int) -> str:
        with pytest.raises(zero3d.DataError) as caught:
            cross_entropy(split(torch.randn(3, 5), tp_axis()), torch.tensor([1, target, -100]))
        return str(caught.value)

    for target in (5, 6, -3):
        told = run_ranks(2, work, target)
        assert told[0] == told[1] and f"such as {target}" in told[0] and "from 0 to 4, or -100" in told[0]
