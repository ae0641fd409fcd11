"""Offload on a GPU: numbers, order, and the memory between host and device.

Bit-equal: everything, where each operation of the optimizer rounds once. Close: gradient norms between homes, and with
them what is clipped, as host and device add the 64 squares of a group in other orders; AdamW between homes, as torch's
kernels for CPU and GPU are not the same arithmetic.
"""

from functools import partial
from threading import Event
from typing import Any

import pytest
import torch

import zero3d
from tests.gpu.runs import (
    ALL_ON_HOST,
    HOST,
    BackwardEnds,
    Blocks,
    Mark,
    Stepwise,
    batches,
    config,
    loss,
    queue_with,
    same,
    slowed,
    trained,
)
from zero3d.comm.streams import Queue
from zero3d.offload import queues

OFFLOADED: list[tuple[int, dict[str, Any]]] = [(1, HOST), (2, HOST), (3, HOST), (3, ALL_ON_HOST)]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_offload_changes_no_bit(compute: str) -> None:
    for level, offload in OFFLOADED:
        here, there = trained(config(level, compute)), trained(config(level, compute, offload))
        assert same(there, here), (level, offload)
        assert there.norms == pytest.approx(here.norms, rel=1e-6), (level, offload)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_adamw_on_the_host_is_the_same_at_every_level_and_close_to_the_devices(compute: str) -> None:
    clipped = {"optimizer": {"lr": 1e-3, "clip_norm": 0.5}}
    first = trained(config(1, compute, HOST, **clipped), "adamw")
    for level, offload in OFFLOADED[1:]:
        found = trained(config(level, compute, offload, **clipped), "adamw")
        assert same(found, first) and found.norms == first.norms, (level, offload)
    here = trained(config(1, compute, **clipped), "adamw")
    # Weights are not compared: where a gradient is nothing but rounding, Adam makes a whole step of its sign.
    assert first.losses == pytest.approx(here.losses, rel=1e-4 if compute == "fp32" else 1e-2)


@pytest.mark.parametrize("delayed", [0, 1])
def test_delays_in_the_queues_streams_change_no_bit(delayed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is given back, or read, before the copy is through would have other numbers by then."""
    more = {"delayed_update": delayed} if delayed else {}
    cases = [config(level, "bf16", {**offload, **more}) for level, offload in OFFLOADED]
    expected = [trained(case) for case in cases]
    with monkeypatch.context() as patch:
        patch.setattr(queues, "Queue", queue_with(slowed(0.001)))
        late = [trained(case) for case in cases]
    # And the other way round: the model's own stream is behind.
    behind = [trained(case, build=partial(Blocks, forward=0.002, backward=0.002)) for case in cases]
    for case, one, slow, waiting in zip(cases, expected, late, behind):
        assert same(slow, one) and same(waiting, one), case


@pytest.mark.parametrize(("level", "offload"), OFFLOADED)
def test_the_first_bucket_is_down_before_backward_ends(
    level: int, offload: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the device's own clock: its stream is kept busy before each block's backward, and copies go on meanwhile."""
    downs: list[Mark] = []

    def marked(queue: Queue, number: int, job: Any) -> None:
        job()
        if queue.name == "down":
            downs.append(Mark(device))

    monkeypatch.setattr(queues, "Queue", queue_with(marked))
    build = partial(Blocks, backward=0.1)
    engine = zero3d.Engine(build, loss, Stepwise, config(level, "bf16", offload))
    for batch in batches(2):
        downs.clear()
        ends = BackwardEnds(device)
        engine.step(batch, ends)
        assert downs[0].is_before(ends.marks[0])
    engine.close()


@pytest.mark.parametrize(("level", "offload"), OFFLOADED[:3])
def test_the_first_weights_are_up_before_the_last_bucket_is_updated(
    level: int, offload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made certain: the last update does not begin before."""
    updates, up = [0], Event()
    last = first = -1

    def around(queue: Queue, number: int, job: Any) -> None:
        if queue.name == "update":
            updates[0] += 1
            assert number != last or up.wait(60), "the first weights wait for the last update"
        job()
        if queue.name == "up" and number == first:
            up.set()

    monkeypatch.setattr(queues, "Queue", queue_with(around))
    engine = zero3d.Engine(Blocks, loss, Stepwise, config(level, "bf16", offload))
    one, two = batches(2)
    engine.step(one)
    engine.full_state_dict()  # waits for all updates
    first = updates[0]
    last = 2 * first - 1
    assert first > 2
    engine.step(two)
    engine.full_state_dict()
    assert up.is_set() and updates[0] == 2 * first
    engine.close()


def test_staging_is_pinned_and_bounded(device: torch.device) -> None:
    """Two buffers a direction, of the largest shard; nothing else on the host is pinned."""
    for (level, offload), ups in zip(OFFLOADED, (2, 2, 2, 0)):
        engine = zero3d.Engine(Blocks, loss, Stepwise, config(level, "bf16", offload))
        for batch in batches(2):
            engine.step(batch)
        pinned = device.type == "cuda"
        buffers = [one for kind, one in engine._parts.homes.held() if kind == "staging" and one.numel()]
        shards = engine._parts.replica.shards
        largest = max(shard.master.numel() for shard in shards)
        assert all(buffer.is_pinned() == pinned for buffer in buffers)
        # At one rank gradients travel in the dtype they were computed in, two bytes; weights up as well.
        assert engine.held_bytes()["staging"] == [2 * 2 * largest + ups * 2 * largest]
        assert not any(tensor.is_pinned() for shard in shards for tensor in (shard.master, shard.gradient))
        engine.close()


def test_with_parameters_on_the_host_the_device_keeps_none() -> None:
    found = trained(config(3, "bf16", ALL_ON_HOST))
    assert found.held["weights"] == found.held["gradients"] == found.held["optimizer"] == [0]
    assert found.held["host"][0] > 0
