"""Split logits in one process: what they refuse, what the loss keeps, and that training takes them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero3d
from tests import reference, tiny
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.comm.solo_axis import SoloAxis
from zero3d.models import losses
from zero3d.tensor.loss import SplitLogits, next_token_loss
from zero3d.trees import map_tensors, tensors_in

USES: dict[str, Callable[[Any], Any]] = {
    "`float`": lambda logits: logits.float(),
    "`size`": lambda logits: logits.size(-1),
    "`flatten`": lambda logits: F.cross_entropy(logits.flatten(0, -2), torch.zeros(6)),
    "torch's `cross_entropy`": lambda logits: F.cross_entropy(logits, torch.zeros(2, 3)),
    "torch's `argmax`": lambda logits: torch.argmax(logits, -1),
    "torch's `add`": lambda logits: torch.ones(2, 3, 8) + logits,
    "operator": lambda logits: logits / 2,
    "an operator": lambda logits: logits[:, -1],
}


def split(logits: Tensor) -> SplitLogits:
    return SplitLogits(logits, logits.size(-1), RecordedAxis(SoloAxis()))


@pytest.mark.parametrize("what", USES)
def test_what_needs_whole_logits_is_refused_with_the_ways_out(what: str) -> None:
    with pytest.raises(zero3d.UsageError) as caught:
        USES[what](split(torch.randn(2, 3, 8)))
    told = str(caught.value)
    assert what in told
    assert all(way in told for way in ("zero3d.cross_entropy(", "logits.whole()", '"colwise_gather_output"'))


def test_other_names_are_no_attributes() -> None:
    """So that code which asks for `output.logits`, or copies an output, finds what it would find on any object."""
    logits = split(torch.randn(2, 8))
    assert logits.shape == (2, 8)
    assert not hasattr(logits, "logits") and not isinstance(logits, Tensor)
    assert torch.equal(copy.copy(logits).local, logits.local)


def test_hooks_see_the_columns_and_leave_the_axis_alone() -> None:
    """What walks through a model's output for tensors must neither find nor copy the buffers of an axis."""

    class Buffered(SoloAxis):
        def __init__(self) -> None:
            self.scratch = torch.full((3,), torch.nan)

    logits = SplitLogits(torch.randn(2, 8), 8, RecordedAxis(Buffered()))
    assert [id(tensor) for tensor in tensors_in({"logits": logits})] == [id(logits.local)]
    changed = map_tensors(lambda tensor: tensor + 1, logits)
    assert changed.axis is logits.axis and torch.equal(changed.local, logits.local + 1)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((torch.randn(2, 8), torch.zeros(2)), "float32"),
        ((torch.randn(2, 8), torch.zeros(3, dtype=torch.int64)), "shape [2]"),
        (({"logits": 1}, torch.zeros(2, dtype=torch.int64)), "output.logits"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: Any, part: str) -> None:
    with pytest.raises(zero3d.UsageError) as caught:
        zero3d.cross_entropy(*arguments)
    assert part in str(caught.value)


@pytest.mark.parametrize("options", [{"label_smoothing": 1.1}, {"label_smoothing": -0.1}, {"z_loss": -1.0}])
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(zero3d.UsageError, match="label_smoothing is from 0 to 1"):
        zero3d.cross_entropy(torch.randn(2, 8), torch.tensor([1, 2]), **options)


def test_a_second_derivative_is_refused_not_wrong() -> None:
    logits = torch.randn(2, 8, requires_grad=True)
    loss, _ = zero3d.cross_entropy(logits, torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_only_a_chunk_exists_in_fp32_and_only_the_gradient_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", 640)

    class Largest(TorchDispatchMode):
        sizes: dict[torch.dtype, int] = {}  # noqa: RUF012

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            for tensor in tensors_in(out):
                self.sizes[tensor.dtype] = max(self.sizes.get(tensor.dtype, 0), tensor.numel())
            return out

    kept: list[Tensor] = []
    logits = torch.randn(100, 64, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(64, (100,))
    keeping = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda saved: saved
    )
    with keeping, Largest() as largest:
        zero3d.cross_entropy(split(logits), targets, label_smoothing=0.1, z_loss=1e-4)
    assert largest.sizes[torch.float32] == 640 + 100 // 64 * 64
    assert [(tensor.dtype, tensor.shape) for tensor in kept] == [(torch.bfloat16, (100, 64))]


def test_there_are_at_most_64_chunks_of_logits_of_any_number() -> None:
    for rows, width in ((1, 1 << 22), (63, 1 << 22), (32768, 128_256), (1 << 20, 32_000), (7, 50)):
        step = losses.rows_at_a_time(rows, width)
        assert 1 <= step <= rows
        assert -(-rows // step) <= 64
        assert (step - 1) * width <= losses.CHUNK + rows * width / 64


class SplitHead(nn.Module):
    """A linear layer whose output is split, as of tensor parallelism over one rank, with padding columns."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight
        self.axis = SoloAxis()

    def forward(self, x: Tensor) -> SplitLogits:
        return SplitLogits(F.pad(F.linear(x, self.weight), (0, 3)), tiny.VOCABULARY, self.axis)


@pytest.mark.parametrize("level", [0, 3])
def test_a_model_that_ends_in_split_logits_trains_as_the_plain_one(level: int) -> None:
    """Close, 1e-5: the loss is added up in another order than torch's."""
    model = tiny.tiny()
    model.head = SplitHead(model.head)  # type: ignore[assignment]
    engine = zero3d.Engine(model, next_token_loss, tiny.adamw, {"zero": {"level": level}})
    batches = tiny.batches(3, 4)
    trained = [engine.step(batch).loss for batch in batches]
    heldout = engine.evaluate(batches[0]).loss
    engine.close()
    plain = tiny.tiny()
    steps = [[batch] for batch in batches]
    trace = reference.train(plain, tiny.loss, tiny.adamw, steps, call=lambda m, b: m(b["tokens"]))
    assert trained == pytest.approx(trace.losses, rel=1e-5)
    total, count = tiny.loss(plain(batches[0]["tokens"]), batches[0])
    assert heldout == pytest.approx(float(total / count), rel=1e-5)
