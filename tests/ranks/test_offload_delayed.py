"""`offload.delayed_update`: the host updates for one step while the device computes the next.

Bit-equal: levels 0 to 3, homes and ranks among each other at one number of ranks. Close (1e-5 in fp32): a plain loop
that applies each update's gradient after the forward and backward of the next one's step. A step that is skipped
updates nothing, so what waits to be applied goes on waiting.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3d
from tests import tiny
from tests.offload_cases import HOMES, Trace, assert_close, assert_same_bits, small
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

STEPS, SAMPLES, CLIP, SKIPPED = 7, 8, 0.5, 4
"""In the step before the fifth nobody has a target that counts."""


def batches(skips: bool) -> list[dict[str, Tensor]]:
    found = tiny.batches(STEPS, SAMPLES)
    if skips:
        found[SKIPPED]["targets"].fill_(-100)
    return found


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1, fused=True)


def rate(update: int) -> float:
    """A learning rate that shows whose step an update belongs to."""
    return (update + 1) / STEPS


def train_plain(warm_up: int, skips: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(losses, norms, weights); `warm_up`: so many updates are in time."""
    model = small()
    parameters = list(model.parameters())
    optimizer = adamw(parameters)
    late: tuple[float, Sequence[Tensor]] | None = None
    losses, norms, updates = [], [], 0

    def apply(lr: float, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = 1e-2 * lr
        optimizer.step()

    for batch in batches(skips):
        optimizer.zero_grad(set_to_none=True)
        total, counted = tiny.loss(model(batch["tokens"]), batch)
        if not counted:
            continue
        (total / counted).backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = float(torch.stack([one.double().square().sum() for one in gradients]).sum().sqrt())
        scaled = [one * min(1.0, CLIP / (norm + 1e-6)) for one in gradients]
        losses.append(float((total / counted).detach()))
        norms.append(norm)
        if late is not None:
            apply(*late)
            late = None
        if updates < warm_up:
            apply(rate(updates), scaled)
        else:
            late = rate(updates), scaled
        updates += 1
    if late is not None:
        apply(*late)
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def all_plain(warm_ups: Sequence[int], skips: bool) -> list[tuple[list[float], list[float], dict[str, Tensor]]]:
    return [train_plain(warm_up, skips) for warm_up in warm_ups]


def train(level: int, home: dict[str, Any], delay: int, skips: bool, precision: str, folder: str, **zero: Any) -> Trace:
    offload = home | {"delayed_update": delay} | ({"folder": folder} if home["optimizer"] == "disk" else {})
    config = {
        "zero": {"level": level, "reduce": "micro-batch", "bucket_mb": 0.03, **zero},
        "parallel": {"micro_batch": 2},
        "precision": {"compute": precision},
        "optimizer": {"clip_norm": CLIP, "schedule": "linear", "warmup": STEPS},
        "run": {"steps": STEPS},
        "offload": offload,
    }
    engine, trace = zero3d.Engine(small(), tiny.loss, adamw, config), Trace()
    for batch in batches(skips):
        report = engine.step(tiny.part(batch, engine.dp_index, engine.dp_size))
        if not report.skipped:
            trace.losses.append(report.loss)
            trace.numbers += [report.loss, report.grad_norm, report.lr]
    trace.tensors = engine.full_state_dict()
    engine.close()
    return trace


def train_all(runs: Sequence[tuple[Any, ...]], folder: str) -> list[Trace]:
    return [train(*run, folder) for run in runs]


@pytest.mark.parametrize("skips", [False, True], ids=["", "a skipped step"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_are_one_step_late(ranks: int, skips: bool, tmp_path: Path) -> None:
    homes = [(level, "host") for level in (1, 2, 3)] + [(2, "disk"), (3, "host, weights too")]
    kinds = [(level, HOMES[home]) for level, home in [*homes, *([(0, "host")] if ranks == 1 else [])]]
    delays = (1, 3) if skips else (1, 2, 3)
    runs = [(*kind, delay, skips, "fp32") for delay in delays for kind in kinds]
    traces = run_ranks(ranks, train_all, runs, str(tmp_path), timeout=200)
    [[in_time, *plain]] = run_ranks(1, all_plain, (STEPS + 1, *delays), skips)
    for start, (delay, (losses, norms, weights)) in enumerate(zip(delays, plain)):
        assert losses[: delay + 1] == in_time[0][: delay + 1] and losses[delay + 1] != in_time[0][delay + 1]
        first = traces[0][start * len(kinds)]
        torch.testing.assert_close(first.losses, losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(first.numbers[1::3], norms, rtol=1e-5, atol=0)
        assert_close(first, weights, f"delayed by {delay}")
        for found in traces:
            for kind, trace in zip(kinds, found[start * len(kinds) :]):
                assert_same_bits(trace, first, (kind, delay))
