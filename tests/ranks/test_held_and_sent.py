"""What ranks hold and send, counted: model states to the byte, traffic by the axis and by the kernel."""

import ctypes
import fcntl
import gc
import os
import socket
import struct
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

import zero3d
from tests import tiny
from tests.world import run_ranks
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.losses import next_token_loss
from zero3d.planner.memory import Widths, states

pytestmark = pytest.mark.ranks

WIDTHS = {
    ("bf16", "fp32"): Widths(weights=2, gradients=4, optimizer=12),
    ("bf16", "compute"): Widths(weights=2, gradients=2, optimizer=12),
    ("fp16", "compute"): Widths(weights=2, gradients=2, optimizer=12),
    ("fp32", "fp32"): Widths(weights=4, gradients=4, optimizer=8),
}


def held(level: int, compute: str, gradients: str, reduce: str) -> tuple[dict[str, int], int, int, int]:
    """(bytes by kind, padded parameters, parameters, bytes of all live storages)."""
    options = {
        "zero": {"level": level, "reduce": reduce},
        "precision": {"compute": compute, "gradients": gradients},
    }
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, options)
    ranks = engine.dp_size
    for batch in tiny.batches(2, 2 * ranks):
        engine.step(tiny.part(batch, engine.rank, ranks))
    mine = {kind: values[engine.rank] for kind, values in engine.held_bytes().items()}
    padded = sum(shard.bucket.numel for shard in engine._parts.replica.shards)
    live = sum(storages().values())
    return mine, padded, sum(info.numel for info in engine.parameters), live


def storages() -> dict[int, int]:
    """Of all live tensors that did not come with the fork: where each storage is, and its bytes."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor:
            storage = torch.Tensor.untyped_storage(one)
            found[storage._cdata] = storage.nbytes()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("level", range(4))
def test_model_states_equal_the_formula_to_the_byte(level: int, ranks: int) -> None:
    for (compute, gradients), widths in WIDTHS.items():
        for reduce in ("step", "micro-batch"):
            for mine, padded, parameters, live in run_ranks(ranks, held, level, compute, gradients, reduce):
                expected = states(padded, level, dp=ranks, widths=widths, reduce=reduce)  # type: ignore[arg-type]
                found = (mine["weights"], mine["gradients"], mine["optimizer"])
                assert found == (expected.weights, expected.gradients, expected.optimizer), (compute, gradients)
                # Padding: under 64 elements a parameter, under 64 a rank and bucket.
                assert parameters <= padded < parameters + 64 * 34 + 64 * ranks * 7
                counted = sum(mine[kind] for kind in ("weights", "gradients", "optimizer", "buffers"))
                # What else is alive are the batches and single numbers.
                assert counted <= live < counted + 20_000


def buffers(layers: int, mode: str) -> int:
    """Bytes of all buffers after two steps at level 3, with blocks recomputed or not."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=256, sequence_length=8, width=64, layers=layers, heads=4, tied=False))
    config = {"zero": {"level": 3}, "recompute": {"mode": mode}, "parallel": {"micro_batch": 1}}
    engine = zero3d.Engine(model, next_token_loss, "adamw", config)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(2):
        engine.step({"tokens": tokens, "targets": tokens})
    lasting = sum(buffer.nbytes for buffer in engine.model.buffers()) + 1000 * layers  # counters of steps
    return engine.held_bytes()["buffers"][engine.rank] - lasting


def test_recomputed_blocks_are_gathered_one_after_the_other() -> None:
    """A recomputation ends without an output where all is there that was wanted: nothing is held for it."""
    few, many = (max(run_ranks(2, buffers, layers, "block")) for layers in (4, 12))
    block = 12 * 64 * 64 * 4
    assert abs(many - few) < block
    assert abs(max(run_ranks(2, buffers, 12, "none")) - many) < block


def traffic(level: int, steps: int) -> tuple[int, int, int]:
    """(bytes a step that the axis counted, that the kernel's loopback sent for all ranks, parameters)."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=256, sequence_length=8, width=256, layers=4, heads=4, tied=False))
    engine = zero3d.Engine(model, next_token_loss, tiny.adamw, {"zero": {"level": level}})
    tokens = torch.randint(0, 256, (1, 9))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    engine.step(batch)
    engine.evaluate(batch)  # Weights that are still being published arrive.
    torch.distributed.barrier()
    axis_before, kernel_before = engine._parts.axis.sent_bytes, loopback_sent()
    torch.distributed.barrier()
    for _ in range(steps):
        engine.step(batch)
    with engine.gathered() if level in (1, 2) else torch.no_grad():
        torch.distributed.barrier()
    counted = (engine._parts.axis.sent_bytes - axis_before) // steps
    sent = (loopback_sent() - kernel_before) // steps
    torch.distributed.barrier()
    return counted, sent, sum(info.numel for info in engine.parameters)


def loopback_sent() -> int:
    with open("/proc/self/net/dev") as lines:
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def in_private_network(work: Callable[[], Any]) -> Any:
    """`work()` in a forked process whose loopback carries nobody else's bytes, where the kernel allows that."""
    mine, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            private = ctypes.CDLL(None, use_errno=True).unshare(0x40000000) == 0  # CLONE_NEWNET
            if private:
                bring_up_loopback()
            theirs.send((work(), private, ""))
        except BaseException as error:
            theirs.send((None, False, str(error)))
        finally:
            os._exit(0)
    theirs.close()
    result, private, failure = mine.recv()
    os.waitpid(pid, 0)
    assert not failure, failure
    return result, private


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, up and running


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("level", range(4))
def test_bytes_sent_equal_the_formula(level: int, ranks: int) -> None:
    results, private = in_private_network(lambda: run_ranks(ranks, traffic, level, 3))
    parameters = results[0][2]
    passes = 3 if level == 3 else 2
    expected = 4 * passes * parameters * (ranks - 1) / ranks
    for counted, _, _ in results:
        assert counted == pytest.approx(expected, rel=0.03)
    kernel = min(sent for _, sent, _ in results) / ranks
    if private:
        assert kernel == pytest.approx(expected, rel=0.03)
    else:
        assert kernel > 0.97 * expected


def grows(level: int) -> list[int]:
    """Bytes of gather and reduce buffers after each of six steps."""
    engine = zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, {"zero": {"level": level, "bucket_mb": 0.02}})
    found = []
    for batch in tiny.batches(6, 4):
        engine.step(tiny.part(batch, engine.rank, 2))
        found.append(engine.held_bytes()["buffers"][engine.rank])
    return found


@pytest.mark.parametrize("level", range(4))
def test_c69_buffers_are_reused(level: int) -> None:
    for sizes in run_ranks(2, grows, level):
        assert len(set(sizes[1:])) == 1
