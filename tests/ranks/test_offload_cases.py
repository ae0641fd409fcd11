"""Cases of how users of comparable tools get hurt by offload: memory, disks, compilers, optimizers, ranks that die."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from tests.ranks.test_building import BLOCK_BYTES, LAYERS, Peak, Wide, own_memory
from tests.world import run_ranks
from zero3d.cli.failure import is_echo

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]


# C66: each rank loads the whole model in host memory before it is sharded.


def build(offload: dict[str, Any]) -> tuple[int, int]:
    """(what building took at most beyond what stays, what stays) in bytes; there are no moments before the first step,
    and the pages of gradients are untouched until then."""
    before, peak = own_memory(), Peak()
    peak.start()
    engine = zero3d.Engine(
        Wide, lambda out, _: (out.sum(), 1), config={"zero": {"level": 3}, "offload": {"threads": 1, **offload}}
    )
    peak.over.set()
    peak.join()
    shards = engine._parts.replica.shards
    stays = sum(
        one.nbytes for one in {id(one): one for shard in shards for one in (shard.weights, shard.master)}.values()
    )
    return peak.most - before - stays, stays


@pytest.mark.parametrize("parameters", ["device", "host"])
def test_c66_no_rank_holds_the_whole_model_while_it_is_built(parameters: str) -> None:
    """Master weights of fp32 weights are apart from these, unless both are on the host."""
    model, ranks = BLOCK_BYTES * LAYERS, 4
    found = run_ranks(ranks, build, {"optimizer": "host", "parameters": parameters}, timeout=120)
    for extra, stays in found:
        assert stays < 1.01 * (1 if parameters == "host" else 2) * model / ranks
        assert extra < 4 * BLOCK_BYTES
    assert sum(extra for extra, _ in found) < 1.5 * model


# C70: tensors whose sizes no block of a disk divides; a full disk.

SIZES = (1, 511, 4097)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(size) for size in SIZES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(part * x[:, : len(part)]).sum(1) for part in self.parts]).square().sum(0)


def odd_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, max(SIZES), generator=generator) for _ in range(3)]


def summed(out: Tensor, _: Any) -> tuple[Tensor, int]:
    return out.sum(), len(out)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)


def on_disk(level: int, folder: str) -> dict[str, Tensor]:
    home = {"optimizer": "disk", "folder": folder}
    engine = zero3d.Engine(Odd(), summed, adam, {"zero": {"level": level}, "offload": home})
    for batch in odd_batches():
        engine.step(batch.chunk(engine.dp_size)[engine.dp_index])
    assert engine.held_bytes()["disk"][engine.rank] > 0
    return engine.full_state_dict()


@pytest.mark.parametrize("level", [1, 2, 3])
def test_c70_odd_sizes_on_disk_equal_the_plain_loop(level: int, tmp_path: Path) -> None:
    steps = [[batch] for batch in odd_batches()]
    expected = reference.train(Odd(), summed, adam, steps, call=lambda model, batch: model(batch)).weights
    for ranks in (1, 2):
        for found in run_ranks(ranks, on_disk, level, str(tmp_path)):
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def fill_up(folder: str) -> str:
    """What is said of it on each rank. Rank 1's folder is on a disk of 64 kB."""
    mine = folder if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 1 else folder + "-roomy"
    options = {"zero": {"level": 2}, "offload": {"optimizer": "disk", "folder": mine}}
    try:
        zero3d.Engine(tiny.tiny(), tiny.loss, config=options)
    except zero3d.OutOfSpaceError as error:
        return str(error)
    return "no error"


def on_a_small_disk(folder: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    for text in run_ranks(2, fill_up, folder):
        assert "rank 1: optimizer state needs" in text and folder in text and "are free" in text, text
        assert text.count("offload.folder") == 1, text
    print("all as it should be")


def test_c70_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        able = subprocess.run([*apart, "mount", "-t", "tmpfs", "tmpfs", small], capture_output=True).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("this process may not mount a small disk")
    code = "import sys, torch._dynamo; from tests.ranks.test_offload_cases import *; on_a_small_disk(sys.argv[1])"
    ran = subprocess.run(
        [*apart, sys.executable, "-c", code, small], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.strip() == "all as it should be", ran.stderr


# C73: the host's optimizer needs no compiler.

NO_COMPILER = """
import sys

started = []
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn")
sys.addaudithook(lambda event, args: started.append((event, args)) if event in STARTS else None)

import torch
import zero3d
from tests import tiny

engine = zero3d.Engine(tiny.tiny(layers=1), tiny.loss, config={"offload": {"optimizer": "host"}})
losses = [engine.step(batch).loss for batch in [tiny.batches(1, 4)[0]] * 4]
assert losses[-1] < losses[0], losses
built = {"torch.utils.cpp_extension", "setuptools", "distutils", "torch._inductor.codecache"} & set(sys.modules)
print("trained", started, sorted(built))
"""


def test_c73_offload_trains_where_there_is_no_compiler(tmp_path: Path) -> None:
    """No program is started, and nothing is imported that builds one. (torch's own optimizers import some of
    torch._inductor, but not what it compiles with.)"""
    environment = {**os.environ, "PATH": str(tmp_path), "CC": "/nowhere", "CXX": "/nowhere"}
    ran = subprocess.run(
        [sys.executable, "-c", NO_COMPILER], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.strip() == "trained [] []", (ran.stdout, ran.stderr[-2000:])


# C78: the user's own optimizer.


class OwnSGD(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    moving = self.state[one].setdefault("moving", torch.zeros_like(one))
                    one.sub_(moving.mul_(group["momentum"]).add_(one.grad), alpha=group["lr"])


def own(level: int, offload: dict[str, Any]) -> dict[str, Tensor]:
    options = {"zero": {"level": level}, "parallel": {"micro_batch": 2}, "offload": offload}
    engine = zero3d.Engine(tiny.tiny(layers=2), tiny.loss, OwnSGD, options)
    for batch in tiny.batches(4, 8):
        engine.step(tiny.part(batch, engine.rank, engine.world))
    engine.close()
    return engine.full_state_dict()


def own_everywhere(folder: str) -> list[dict[str, Tensor]]:
    homes: list[dict[str, Any]] = [{"optimizer": "host"}, {"optimizer": "disk", "folder": folder}]
    return [own(level, home) for level in (1, 2, 3) for home in homes]


def test_c78_an_optimizer_of_the_users_own(tmp_path: Path) -> None:
    """Bit-equal: levels and homes. Close: the plain loop, which adds a whole batch at once."""
    steps = [[batch] for batch in tiny.batches(4, 8)]
    model = tiny.tiny(layers=2)
    expected = reference.train(model, tiny.loss, OwnSGD, steps, call=lambda m, b: m(b["tokens"])).weights
    for ranks in (1, 2):
        for found in run_ranks(ranks, own_everywhere, str(tmp_path)):
            for weights in found:
                for name, value in weights.items():
                    assert torch.equal(value, found[0][name]), name
                    assert float((value - expected[name]).abs().max() / expected[name].abs().max()) < 1e-5, name


def refused(optimizer: Any, **zero: Any) -> str:
    try:
        zero3d.Engine(tiny.tiny(), tiny.loss, optimizer, {"zero": zero, "offload": {"optimizer": "host"}})
    except zero3d.UsageError as error:
        return str(error)
    return "not refused"


def all_refused() -> list[str]:
    return [refused("adafactor"), refused("adafactor", whole_parameters=["auto"])]


def test_c78_an_optimizer_of_whole_matrices_is_refused_with_the_reason() -> None:
    for elementwise, whole in run_ranks(2, all_refused):
        assert "does not treat each element by itself" in elementwise and "Adafactor" in elementwise
        assert "whole parameters stays on the device" in whole and 'offload.optimizer = "device"' in whole
        # What one hint says the other must not refuse.
        assert 'offload.optimizer = "device"' in elementwise, elementwise


# A rank dies in the middle of an update.


def step_on(engine: zero3d.Engine) -> float:
    losses = [engine.step(tiny.part(batch, engine.rank, 2)).loss for batch in tiny.batches(3, 8)]
    engine.full_state_dict()
    return losses[-1]


def train_on_disk(folder: str) -> float:
    engine = _engine(folder)
    loss = step_on(engine)
    engine.close()
    return loss


def _engine(folder: str) -> zero3d.Engine:
    options = {"zero": {"level": 2}, "offload": {"optimizer": "disk", "folder": folder}}
    return zero3d.Engine(tiny.tiny(), tiny.loss, tiny.adamw, options)


def killed_in_an_update(rank: int, folder: Path) -> None:
    """Rank 1 dies in its fifth update of a bucket, while others wait in the queue; rank 0 writes down what it got."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    engine = _engine(str(folder / "state"))
    optimizer: Any = engine._parts.optimizer
    update: Callable[..., None] = optimizer._update
    calls = count(1)

    def dying(*args: Any) -> None:
        if rank == 1 and next(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        update(*args)

    optimizer._update = dying
    try:
        step_on(engine)
    except Exception as error:  # the command tells the cause from it, if it is an echo of another rank's end
        (folder / "told").write_text(f"{is_echo(error)}")


def test_a_rank_killed_in_an_update_ends_the_others_and_the_folder_is_used_again(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=killed_in_an_update, args=(rank, tmp_path)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(50)  # less than the time-out of its calls: it must not be that which ends it
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        one.kill()
    assert codes == [0, -signal.SIGKILL]
    assert (tmp_path / "told").read_text() == "True"
    assert list((tmp_path / "state" / "rank-00001").glob("state-*"))  # it was killed, and could not clear up
    first, second = run_ranks(2, train_on_disk, str(tmp_path / "state"))
    assert first == second
    assert not list((tmp_path / "state").glob("rank-*/state-*"))


RAISES = """
import torch
import zero3d
from tests import tiny

class Raising(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ValueError("it fails in an update")
        super().step()

config = {"zero": {"bucket_mb": 0.02}, "offload": {"optimizer": "host"}}
engine = zero3d.Engine(tiny.tiny(), tiny.loss, lambda parameters: Raising(parameters, lr=0.1), config)
first, second = tiny.batches(2, 4)
engine.step(first)
Raising.fails = True
for batch in (second, first):
    engine.step(batch)
"""


def test_what_fails_in_an_update_ends_the_process() -> None:
    """Updates that failed kept the two staging buffers, for which those behind them waited: the process hung as it
    ended."""
    ran = subprocess.run([sys.executable, "-c", RAISES], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1 and ran.stderr.strip().endswith("ValueError: it fails in an update"), ran.stderr


# A parameter that no rank used in a step: what goes up for it is not what else the staging buffer held.


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(self.b(h) if float(x[0, 0]) > 0 else h)


def leave_out(level: int, offload: dict[str, Any]) -> tuple[list[float], bool]:
    """Losses, and whether what the model computes with is what the optimizer has."""
    torch.manual_seed(0)
    options = {"zero": {"level": level, "bucket_mb": 1e-6}, "offload": offload}
    engine = zero3d.Engine(Branches(), lambda y, _: (y.square().sum(), y.numel()), "adamw", options)
    losses = []
    for step, sign in enumerate([1, 1, -1, 1, -1, -1, 1]):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).abs() * sign
        losses.append(engine.step(x).loss)
    with engine.gathered() as model:
        computing = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    same = all(torch.equal(value, computing[name]) for name, value in engine.full_state_dict().items())
    engine.close()
    return losses, same


@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_no_rank_used_in_a_step_keeps_its_weights(level: int) -> None:
    plain = run_ranks(2, leave_out, level, {})
    assert run_ranks(2, leave_out, level, {"optimizer": "host"}) == plain
    assert all(same for _, same in plain)


UNCLOSED = """
import torch, zero3d
from torch import nn
model = nn.Sequential(*[nn.Linear(700, 700) for _ in range(8)])
options = {"zero": {"level": 2, "bucket_mb": 1}, "offload": {"optimizer": "host"}}
engine = zero3d.Engine(model, lambda y, batch: y.square().mean(), "adamw", options)
for _ in range(2):
    engine.step(torch.randn(2, 700))
"""


def test_a_script_that_closes_nothing_ends() -> None:
    """Its last updates, which make jobs of other queues, are under way when the main thread ends."""
    done = subprocess.run([sys.executable, "-c", UNCLOSED], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
