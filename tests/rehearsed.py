"""The same step rehearsed and run: what both held, sent and computed, for tests and by hand.

python -m tests.rehearsed [NAME ...]
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import torch
from torch import Tensor, nn

import zero3d
from tests.world import run_ranks
from zero3d import census
from zero3d.config import Config
from zero3d.dryrun.ledger import Peak, peak
from zero3d.dryrun.run import Job, rehearse
from zero3d.dryrun.tracker import Tracker
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.llama import Llama, LlamaConfig
from zero3d.step import train_step
from zero3d.tensor.loss import next_token_loss
from zero3d.unwatched import Unwatched

VOCABULARY, LENGTH = 512, 64
HOST_WAITS = 0.1
"""Seconds before what is copied to the host or done there."""


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=VOCABULARY, sequence_length=LENGTH, width=128, layers=6, heads=4))


def llama() -> nn.Module:
    return Llama(
        LlamaConfig(
            vocabulary=VOCABULARY, sequence_length=LENGTH, width=128, layers=6, heads=4, kv_heads=2, mlp_width=256
        )
    )


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(96, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6))
        self.last = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(4)
        )
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) + x
        return self.last(x.mean(dim=(2, 3)))


def hf_llama() -> nn.Module:
    from transformers import LlamaConfig as HfConfig
    from transformers import LlamaForCausalLM

    config = HfConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def hf_loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return next_token_loss(output.logits, {"targets": batch["labels"]})


def hf_call(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch["input_ids"])


def class_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def tokens(size: int) -> Any:
    ids = torch.zeros(size, LENGTH, dtype=torch.long)
    return {"tokens": ids, "targets": ids}


def hf_tokens(size: int) -> Any:
    ids = torch.zeros(size, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    loss: Any
    batch: Callable[[int], Any]
    call: Any = None


MODELS = {
    "gpt": Model(gpt, next_token_loss, tokens),
    "llama": Model(llama, next_token_loss, tokens),
    "mlp": Model(Mlp, class_loss, lambda size: (torch.zeros(size, 96), torch.zeros(size, dtype=torch.long))),
    "conv": Model(
        Convolutions, class_loss, lambda size: (torch.zeros(size, 3, 16, 16), torch.zeros(size, dtype=torch.long))
    ),
    "hf": Model(hf_llama, hf_loss, hf_tokens, hf_call),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    model: str
    settings: tuple[str, ...]
    ranks: int
    micro_batches: int = 2
    size: int = 4

    def __str__(self) -> str:
        return f"{self.model} x{self.ranks} {self.micro_batches}x{self.size} {' '.join(self.settings)}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """lasting: kind -> bytes over steps; sent: axis -> bytes."""

    peak: Peak
    lasting: dict[str, int]
    sent: dict[str, int]
    flops: int
    micro_batches: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def config_of(point: Point) -> Config:
    return Config.load({"parallel": {"micro_batch": point.size}}, list(point.settings))


class SlowHost(Unwatched):
    """A way to the host, and updates there, that are slower than what computes: as much is under way as there can be.
    (Weights come as fast as they do, as a rank waits for them, and all else gets on meanwhile.)"""

    @contextmanager
    def queueing(self, queue: str, what: str) -> Iterator[None]:
        sleep(HOST_WAITS if queue != "up" else 0)
        yield


def real(point: Point) -> Found:
    """On each rank: the third step of a run, whose host is slow."""
    model = MODELS[point.model]
    torch.manual_seed(0)
    engine = zero3d.Engine(model.build, model.loss, "adamw", config_of(point), call=model.call)
    whole = model.batch(point.size * point.micro_batches)
    for _ in range(2):
        engine.step(whole)
    parts = engine._parts
    before = [axis.sent_bytes for axis in parts.axes]
    batches = [model.batch(point.size) for _ in range(point.micro_batches)]
    parts.homes.watch(SlowHost())
    tracker = Tracker(parts.model)
    with tracker:
        train_step(parts, batches, 2, 1.0, tracker)
        parts.replica.settle()
        lasting = tracker.lasting(census.tensors(parts), parts.replica.lent())
    sent = {axis.name: axis.sent_bytes - was for axis, was in zip(parts.axes, before) if axis.size > 1}
    return Found(peak=peak(tracker.lives, lasting), lasting=lasting, sent=sent, flops=tracker.flops.total())


def both(point: Point) -> list[tuple[Found, Found]]:
    """(rehearsed, run) of each rank."""
    ran = run_ranks(point.ranks, real, point)
    model = MODELS[point.model]
    resolved = config_of(point).resolved(point.ranks, native_bf16=False, own_batches=True)
    job = Job(
        source=model.build,
        loss=model.loss,
        optimizer="adamw",
        config=resolved,
        batch=model.batch(point.size),
        call=model.call,
    )
    rehearsal = rehearse(job, range(point.ranks), point.micro_batches)
    found = []
    for one, other in zip(rehearsal.ranks, ran, strict=True):
        sent = {axis: traffic.sent for axis, traffic in one.traffic.items()}
        mine = Found(peak=one.peak, lasting=dict(one.lasting), sent=sent, flops=one.flops)
        found.append((mine, other))
    return found


LEVELS = tuple(f"zero.level={level}" for level in range(4))
BY_MICRO_BATCH = "zero.reduce=micro-batch"
POINTS = [
    *(Point(model=name, settings=(level,), ranks=2) for name in MODELS for level in LEVELS),
    *(Point(model=name, settings=(LEVELS[2], "recompute.mode=block"), ranks=2) for name in MODELS),
    *(Point(model=name, settings=(LEVELS[3], "recompute.mode=block"), ranks=2, micro_batches=1) for name in MODELS),
    *(Point(model=name, settings=(LEVELS[2], "offload.optimizer=host"), ranks=2) for name in MODELS),
    *(
        Point(model=name, settings=(LEVELS[3], "offload.optimizer=host", "offload.parameters=host"), ranks=2)
        for name in MODELS
    ),
    *(
        Point(model=name, settings=(level, "precision.compute=bf16"), ranks=2)
        for name in ("gpt", "hf")
        for level in LEVELS
    ),
    *(Point(model=name, settings=(level,), ranks=4) for name in ("gpt", "conv") for level in LEVELS),
    *(Point(model=name, settings=("parallel.tp=2",), ranks=2) for name in ("gpt", "llama", "hf")),
    *(
        Point(model=name, settings=("parallel.tp=2", "parallel.sequence_parallel=true", LEVELS[3]), ranks=4)
        for name in ("gpt", "llama")
    ),
    *(
        Point(model=name, settings=("parallel.pp=2", level), ranks=ranks, micro_batches=4, size=2)
        for name, ranks in (("gpt", 2), ("llama", 2), ("hf", 2), ("mlp", 4))
        for level in (LEVELS[0], LEVELS[3])
    ),
    *(
        Point(model="gpt", settings=("parallel.pp=2", f"parallel.schedule={name}", *more), ranks=2, micro_batches=6)
        for name, more in (
            ("gpipe", ()),
            ("interleaved", ("parallel.stages_per_rank=2",)),
            ("zbh1", ()),
            ("zbv", ("parallel.stages_per_rank=2",)),
        )
    ),
    *(
        Point(
            model="gpt",
            settings=(
                "parallel.pp=2",
                f"parallel.schedule={name}",
                "parallel.stages_per_rank=2",
                level,
                BY_MICRO_BATCH,
            ),
            ranks=4,
            micro_batches=4,
        )
        for name, level in (("interleaved", LEVELS[2]), ("zbv", LEVELS[3]))
    ),
    *(
        Point(
            model="llama",
            settings=("parallel.pp=4", f"parallel.schedule={name}", "precision.compute=bf16", f"recompute.mode={mode}"),
            ranks=4,
            micro_batches=6,
        )
        for name in ("1f1b", "zbh1")
        for mode in ("none", "block")
    ),
    *(
        Point(model="gpt", settings=("parallel.pp=2", "parallel.schedule=gpipe", *more), ranks=ranks, micro_batches=4)
        for ranks, more in (
            (2, (LEVELS[0], "precision.compute=bf16")),
            (2, (LEVELS[1], "recompute.mode=block")),
            (4, (LEVELS[2], "offload.optimizer=host")),
            (4, (LEVELS[3],)),
            (4, (LEVELS[2], BY_MICRO_BATCH)),
        )
    ),
    *(
        Point(model="gpt", settings=(level,), ranks=1, micro_batches=number)
        for level in (LEVELS[0],)
        for number in (1, 3)
    ),
]


def table(points: list[Point]) -> None:
    worst = 0.0
    for point in points:
        for rank, (mine, other) in enumerate(both(point)):
            apart = abs(mine.peak.total - other.peak.total) / other.peak.total
            worst = max(worst, apart)
            kinds = {
                kind: (mine.peak.by_kind[kind], other.peak.by_kind[kind])
                for kind in mine.peak.by_kind
                if mine.peak.by_kind[kind] != other.peak.by_kind[kind]
            }
            same = f"flops {mine.flops == other.flops} sent {mine.sent == other.sent}"
            print(f"{apart:8.3%} {same} {point} rank {rank} {kinds}", flush=True)
    print(f"{len(points)} points, largest {worst:.2%}")


if __name__ == "__main__":
    table([point for point in POINTS if not sys.argv[1:] or any(name in str(point) for name in sys.argv[1:])])
