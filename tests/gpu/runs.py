"""What the tests of a GPU run. None of it asks for a GPU: tests/single/test_gpu_check.py runs it on a CPU."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero3d
from zero3d.assemble import assemble
from zero3d.comm.mesh import mesh_over
from zero3d.comm.streams import Queue
from zero3d.contracts import Axis
from zero3d.pipeline.action import Action, Kind
from zero3d.step import train_step
from zero3d.unwatched import Unwatched

VOCABULARY, LENGTH, SAMPLES = 128, 16, 8
HOST = {"optimizer": "host"}
ALL_ON_HOST = {"optimizer": "host", "parameters": "host"}


class Paused(torch.autograd.Function):
    """Keeps the device busy for a while, before it goes on with the forward or with the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        pause(x.device, forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        pause(gradient.device, ctx.seconds)
        return gradient, None, None


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """An embedding, blocks and a head. Before each block the device pauses for so many seconds."""

    def __init__(self, width: int = 64, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)
        self.seconds = forward, backward

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(Paused.apply(x, *self.seconds))
        return self.head(x)


class Stepwise(torch.optim.Optimizer):
    """Momentum whose every operation rounds once, as IEEE 754 says: the same bits on a CPU and on a GPU. AdamW's are
    not, as its kernels there and here fuse and order operations in ways of their own."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["momentum"] * group["lr"])


@dataclass(frozen=True, kw_only=True)
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    held: dict[str, list[int]]


def config(level: int, compute: str = "fp32", offload: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Reduced once a micro-batch everywhere: at one and the same time, so that the numbers are the same."""
    return {
        "zero": {"level": level, "bucket_mb": 0.05, "reduce": "micro-batch"},
        "parallel": {"micro_batch": SAMPLES // 2},
        "precision": {"compute": compute},
        "offload": offload or {},
        **sections,
    }


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(steps)]


def loss(logits: Tensor, tokens: Tensor) -> tuple[Tensor, int]:
    targets = (tokens + 1) % VOCABULARY
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def trained(
    settings: dict[str, Any], optimizer: Any = Stepwise, build: Callable[[], nn.Module] = Blocks, steps: int = 4
) -> Trained:
    """A run on the device that an engine chooses."""
    engine = zero3d.Engine(build, loss, optimizer, settings)
    reports = [engine.step(batch) for batch in batches(steps)]
    found = Trained(
        losses=[one.loss for one in reports],
        norms=[one.grad_norm for one in reports],
        weights={name: tensor.cpu() for name, tensor in engine.full_state_dict().items()},
        held=engine.held_bytes(),
    )
    engine.close()
    return found


def trained_over(axis: Axis, settings: dict[str, Any], steps: int = 3) -> Trained:
    """The same over an axis that is given: the parts of an engine without its choice of ranks."""
    resolved = zero3d.Config.load(settings).resolved(axis.size, True, own_batches=True)
    parts = assemble(Blocks, loss, Stepwise, resolved, mesh_over(axis), None)
    done = [
        train_step(parts, [half.to(parts.device) for half in batch.chunk(2)], step, 1.0)
        for step, batch in enumerate(batches(steps))
    ]
    found = Trained(
        losses=[one.totals.mean_loss for one in done],
        norms=[one.clipping.norm for one in done],
        weights={
            info.name: parts.replica.weight_of(info, slice(0, info.numel)).cpu().view(info.shape)
            for info in parts.infos
        },
        held={},
    )
    parts.close()
    return found


EVERYWHERE: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {}),
    (2, {}),
    (3, {}),
    (2, HOST),
    (3, HOST),
    (3, ALL_ON_HOST),
]


def over_a_group_of_one(
    backend: str, store: str, cases: Sequence[tuple[int, dict[str, Any]]] = EVERYWHERE
) -> list[str]:
    """The (level, offload) whose numbers over a process group of one rank are not those over an axis without any. To be
    run in a process of its own."""
    import torch.distributed as dist

    from zero3d.comm.process_axis import ProcessAxis
    from zero3d.comm.solo_axis import SoloAxis

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    axis = ProcessAxis(dist.group.WORLD, device)  # type: ignore[arg-type]
    wrong = []
    for level, offload in cases:
        settings = config(level, "bf16", offload)
        if not same(trained_over(axis, settings), trained_over(SoloAxis(), settings)):
            wrong.append(f"level {level} {offload}")
    dist.destroy_process_group()
    return wrong


def same(one: Trained, other: Trained) -> bool:
    """Losses and weights, in every bit."""
    return one.losses == other.losses and all(
        torch.equal(one.weights[name], value) for name, value in other.weights.items()
    )


def pause(device: torch.device, seconds: float) -> None:
    """What the current stream is given from now on begins later; on a CPU the thread stands still."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 2e9))  # cycles of about half a nanosecond
    else:
        time.sleep(seconds)


class Mark:
    """A moment of the current stream; on a CPU of the thread."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._at = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def is_before(self, other: "Mark") -> bool:
        if self._event is None:
            return self._at < other._at
        for event in (self._event, other._event):
            event.synchronize()
        return bool(self._event.elapsed_time(other._event) > 0)


class BackwardEnds(Unwatched):
    """Marks the ends of backwards."""

    def __init__(self, device: torch.device) -> None:
        self.marks: list[Mark] = []
        self._device = device

    @contextmanager
    def acting(self, action: Action) -> Iterator[None]:
        yield
        if action.kind is Kind.BACKWARD:
            self.marks.append(Mark(self._device))


Around = Callable[[Queue, int, Callable[[], Any]], None]
"""around(queue, number of the job in its queue, job): runs the job."""


def queue_with(around: Around) -> type[Queue]:
    """To be put in place of `Queue` where the queues of offload are made."""

    class Watched(Queue):
        num_put = 0

        def put(self, job: Callable[[], Any], *more: Any) -> Any:
            number = self.num_put
            self.num_put += 1
            return super().put(lambda: around(self, number, job), *more)

    return Watched


def slowed(seconds: float) -> Around:
    """Pauses on the queue's own stream before and after each job: what does not wait for it comes too early."""

    def around(queue: Queue, number: int, job: Callable[[], Any]) -> None:
        pause(queue.device, seconds)
        job()
        pause(queue.device, seconds)

    return around
