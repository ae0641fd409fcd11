"""Runs with and without offload of one small model, for tests of offload and for `tests/offload_matrix.py`.

A case is a model, what a configuration says of it, and a story: what is done with the engine. A run is a case at one
number of ranks, level, home, precision and `zero.reduce`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import zero3d
from tests import reference, tiny
from zero3d.models.gpt import GPT, GPTConfig

STEPS, SAMPLES = 4, 8
HOMES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"optimizer": "host"},
    "disk": {"optimizer": "disk"},
    "half": {"optimizer": "host", "fraction": 0.5},
    "host, weights too": {"optimizer": "host", "parameters": "host"},
    "disk, weights on the host": {"optimizer": "disk", "parameters": "host"},
}
AWAY = tuple(HOMES)[1:]
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3}
"""eps: a gradient that is zero but for rounding must not become a step of full size."""


@dataclass
class Trace:
    """What a run produced, in order; `tensors` end with the weights."""

    numbers: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def step(self, engine: zero3d.Engine, batch: Any) -> None:
        report = engine.step(batch)
        self.losses.append(report.loss)
        self.numbers += [report.loss, report.grad_norm, report.clip_coefficient, report.skipped, report.loss_scale]


Story = Callable[[zero3d.Engine, Trace], None]


def batches() -> list[dict[str, Tensor]]:
    found = tiny.batches(STEPS, SAMPLES)
    for batch in found:
        batch["tokens"][:, 0].clamp_(min=1)
    return found


def mine(engine: zero3d.Engine, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return tiny.part(batch, engine.dp_index, engine.dp_size)


def trains(engine: zero3d.Engine, trace: Trace) -> None:
    for batch in batches():
        trace.step(engine, mine(engine, batch))


def looks(engine: zero3d.Engine, trace: Trace) -> None:
    """All that reads, between steps."""
    name = engine.parameters[-1].name
    for number, batch in enumerate(batches()):
        trace.step(engine, mine(engine, batch))
        trace.numbers.append(engine.evaluate(mine(engine, batch)).loss)
        with engine.gathered() as model:
            read = [one.double().sum() for one in model.parameters() if one.device.type != "meta"]
            trace.tensors[f"gathered {number}"] = torch.stack(read)
        engine.check_replicas()
        trace.tensors |= {f"weight {number}": engine.weight_of(name), f"gradient {number}": engine.grad_of(name)}
        trace.tensors[f"part {number}"] = engine.weight_of(name, slice(1, 3))
        engine.held_bytes()


def writes(engine: zero3d.Engine, trace: Trace) -> None:
    """All that writes, between steps; the optimizer's state goes on."""
    name = engine.parameters[0].name

    def halve() -> None:
        engine.set_weight(name, engine.weight_of(name) / 2)

    def load() -> None:
        engine.load_state_dict({key: value * 0.75 for key, value in engine.full_state_dict().items()})

    def write() -> None:
        with engine.gathered(write=True) as model:
            for parameter in model.parameters():
                parameter.mul_(1.25)
        engine.set_weight(name, torch.tensor(0.5), (1, 2))

    for batch, change in zip(batches(), (halve, load, write, lambda: None)):
        trace.step(engine, mine(engine, batch))
        change()
        trace.numbers.append(engine.evaluate(mine(engine, batch)).loss)


def edits(engine: zero3d.Engine, trace: Trace) -> None:
    def unfreeze(model: nn.Module) -> None:
        model.requires_grad_(True)
        torch.manual_seed(5)
        model.get_submodule("blocks")[0].up = nn.Linear(tiny.WIDTH, 2 * tiny.WIDTH)  # type: ignore[index]
        model.get_submodule("blocks")[0].down = nn.Linear(2 * tiny.WIDTH, tiny.WIDTH)  # type: ignore[index]

    def freeze(model: nn.Module) -> None:
        model.get_submodule("tokens").requires_grad_(False)

    changes = (lambda: freeze(engine.model), lambda: engine.edit(unfreeze), lambda: engine.edit(lambda _: None), int)
    for batch, change in zip(batches(), changes):
        trace.step(engine, mine(engine, batch))
        change()


def closes(engine: zero3d.Engine, trace: Trace) -> None:
    """Weights are read after it."""
    for batch in batches()[:2]:
        trace.step(engine, mine(engine, batch))
    engine.close()


def uneven(engine: zero3d.Engine, trace: Trace) -> None:
    """The last rank has a quarter of the samples, then all, then none, then five of eight."""
    ranks, last = engine.dp_size, engine.dp_index == engine.dp_size - 1
    for batch, share in zip(batches(), (2, 8, 0, 5)):
        first = {key: value[share:] for key, value in batch.items()}
        others = tiny.part(first, min(engine.dp_index, max(ranks - 2, 0)), max(ranks - 1, 1)) if share < 8 else None
        trace.step(
            engine, ({key: value[:share] for key, value in batch.items()} if share else None) if last else others
        )


def overflows(engine: zero3d.Engine, trace: Trace) -> None:
    """The third step has infinite logits in its last sample, on one dp rank alone."""
    for number, batch in enumerate([*batches(), *batches()]):
        if number == 2:
            batch["tokens"][-1, 0] = 0
        trace.step(engine, mine(engine, batch))
    skipped = trace.numbers[3::5]
    assert skipped[2] and not skipped[1] and not skipped[-1], skipped


class Overflowing(nn.Module):
    """TINY whose logits become infinite where the first token is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.tiny(layers=2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens) * torch.where(tokens[:, :1, None] == 0, float("inf"), 1.0)  # type: ignore[no-any-return]


class Odd(nn.Module):
    """TINY with a part that nobody uses, one for samples whose second token is even alone, and a buffer that counts."""

    used: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.tiny(layers=2)
        self.unused, self.extra = nn.Linear(7, 9), nn.Linear(tiny.VOCABULARY, 1)
        self.register_buffer("used", torch.zeros(2))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.inner(tokens)
        even = tokens[:, 1] % 2 == 0
        self.used += torch.stack([even.any(), torch.tensor(True)]).float()
        return logits * (1 + self.extra(logits).tanh()) if bool(even[0]) else logits  # type: ignore[no-any-return]


def small(**options: Any) -> nn.Module:
    return tiny.tiny(layers=2, **options)


def odd() -> nn.Module:
    torch.manual_seed(1)
    return Odd()


def frozen() -> nn.Module:
    model = small(tied=False)
    for name in ("tokens", "blocks.0.up", "norm"):
        model.get_submodule(name).requires_grad_(False)
    return model


def gpt(tied: bool = False, layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    shape = {"vocabulary": tiny.VOCABULARY, "sequence_length": tiny.LENGTH}
    return GPT(GPTConfig(**shape, width=16, layers=layers, heads=2, tied=tied))


def split_loss(logits: Any, batch: dict[str, Tensor]) -> Any:
    return zero3d.cross_entropy(logits, batch["targets"])


@dataclass(frozen=True, kw_only=True)
class Case:
    """`close`: in fp32 the weights are compared with the plain loop's."""

    worlds: Sequence[int] = (2,)
    levels: Sequence[int] = (1, 2, 3)
    homes: Sequence[str] = ("host", "disk", "host, weights too")
    precisions: Sequence[str] = ("fp32",)
    reduces: Sequence[str] = ("micro-batch",)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: Callable[[], nn.Module] = small
    loss: Callable[[Any, Any], Any] = tiny.loss
    optimizer: Any = None
    story: Story = trains
    close: bool = True


def case(section: str, **options: Any) -> Case:
    """One that differs in a section of the configuration alone."""
    return Case(sections={section: options})


def staged(world: int, model: Callable[[], nn.Module] = gpt, **parallel: Any) -> Case:
    sections = {"parallel": {"micro_batch": 1, **parallel}}
    levels = (0, 1, 2, 3) if world == parallel.get("tp", 1) * parallel.get("pp", 1) else (1, 2, 3)
    return Case(
        worlds=(world,), levels=levels, reduces=("step", "micro-batch"), sections=sections, model=model, loss=split_loss
    )


USERS_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
ZBV = {"pp": 2, "schedule": "zbv", "stages_per_rank": 2}
OWN = partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.9)
CASES: dict[str, Case] = {
    "all": Case(
        worlds=(1, 2, 4),
        levels=(0, 1, 2, 3),
        homes=AWAY,
        precisions=("fp32", "bf16", "fp16"),
        reduces=("step", "micro-batch"),
    ),
    "unfused": Case(precisions=("fp32", "bf16"), optimizer=partial(torch.optim.AdamW, **ADAMW), close=False),
    "own function": Case(precisions=("fp32", "bf16"), optimizer=OWN, close=False),
    "two rules": Case(optimizer={"blocks.*": "adamw", "*": OWN}, close=False),
    "frozen": Case(model=frozen, precisions=("fp32", "bf16")),
    "odd": Case(
        model=odd, sections={"zero": {"keep_gathered": ["extra.*"]}}, reduces=("step", "micro-batch"), close=False
    ),
    "untied": Case(model=partial(small, tied=False)),
    "dropout": Case(model=partial(small, dropout=0.1), close=False),
    "recompute": Case(model=partial(small, dropout=0.1), sections={"recompute": {"mode": "block"}}, close=False),
    "keep gathered": Case(levels=(3,), sections={"zero": {"keep_gathered": "step"}}),
    "keep some gathered": Case(levels=(3,), sections={"zero": {"keep_gathered": ["blocks.0.*"]}}),
    "prefetch 0": Case(levels=(3,), sections={"zero": {"prefetch": 0}}),
    "prefetch 2": Case(levels=(3,), sections={"zero": {"prefetch": 2}}),
    "prefetch 3": Case(levels=(3,), sections={"zero": {"prefetch": 3}}, precisions=("bf16",)),
    "no overlap": case("zero", overlap=False),
    "tiny buckets": case("zero", bucket_mb=1e-6),
    "small buckets": case("zero", bucket_mb=5e-3, prefetch=2),
    "one bucket": case("zero", bucket_mb=1e3),
    "one micro-batch": case("parallel", micro_batch=SAMPLES),
    "micro-batches of 1": Case(reduces=("step", "micro-batch"), sections={"parallel": {"micro_batch": 1}}),
    "uneven": Case(
        worlds=(2, 4), story=uneven, reduces=("step", "micro-batch"), sections={"parallel": {"micro_batch": 1}}
    ),
    "overflow": Case(worlds=(1, 2), model=Overflowing, story=overflows, precisions=("fp16",)),
    "no clipping": case("optimizer", clip_norm=0.0),
    "no decay": Case(sections={"optimizer": {"no_decay": ["blocks.*"]}}, close=False),
    "schedule": Case(sections={"optimizer": {"schedule": "cosine", "warmup": 2}, "run": {"steps": STEPS}}, close=False),
    "gradients as computed": Case(
        worlds=(1, 2),
        precisions=("bf16", "fp16"),
        sections={"precision": {"gradients": "compute"}, "parallel": {"micro_batch": SAMPLES}},
    ),
    "gradients travel in bf16": replace(case("precision", reduce="bf16"), close=False),
    "looks": Case(worlds=(1, 2), story=looks, precisions=("fp32", "bf16")),
    "writes": Case(worlds=(1, 2), story=writes, precisions=("fp32", "bf16"), close=False),
    "edits": Case(worlds=(1, 2), story=edits, precisions=("fp32", "bf16"), close=False),
    "closes": Case(worlds=(1, 2), story=closes, close=False),
    "replicas": Case(worlds=(4,), reduces=("step", "micro-batch"), sections={"zero": {"replicas": 2}}),
    "tp": staged(2, tp=2),
    "tp, sequence": staged(2, tp=2, sequence_parallel=True),
    "tp of the user": Case(
        levels=(0, 1, 2, 3), reduces=("step", "micro-batch"), sections={"parallel": {"tp": 2, "plan": USERS_PLAN}}
    ),
    "dp x tp, sequence": staged(4, tp=2, sequence_parallel=True),
    "pp": staged(2, pp=2),
    "pp, tied": staged(2, partial(gpt, tied=True), pp=2),
    "zbv": staged(2, **ZBV),
    "zbv, tied": staged(2, partial(gpt, tied=True), **ZBV),
    "dp x pp": staged(4, partial(gpt, tied=True), pp=2),
    "tp x pp": staged(4, tp=2, pp=2, sequence_parallel=True),
    "looks in stages": replace(staged(2, partial(gpt, tied=True), pp=2), story=looks),
    "looks in slices": replace(staged(2, tp=2), story=looks),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    case: str
    world: int
    level: int
    home: str
    precision: str
    reduce: str

    def __str__(self) -> str:
        return f"{self.case}: {self.world} ranks level {self.level} {self.home} {self.precision} {self.reduce}"

    @property
    def beside(self) -> "Run":
        """The same without offload."""
        return replace(self, home="device")

    def options(self, folder: str) -> dict[str, Any]:
        home = HOMES[self.home]
        own = {
            "zero": {"level": self.level, "reduce": self.reduce, "bucket_mb": 0.03},
            "parallel": {"micro_batch": 2},
            "precision": {"compute": self.precision},
            "optimizer": {"clip_norm": 0.5} | (ADAMW if CASES[self.case].optimizer is None else {}),
            "offload": home | ({"folder": folder} if home.get("optimizer") == "disk" else {}),
        }
        for section, options in CASES[self.case].sections.items():
            own[section] = {**own.get(section, {}), **options}
        return own


def every_run() -> Iterator[Run]:
    keys = ("world", "level", "home", "precision", "reduce")
    for name, one in CASES.items():
        for values in product(one.worlds, one.levels, one.homes, one.precisions, one.reduces):
            run = Run(case=name, **dict(zip(keys, values)))
            alone = run.world == 1 or run.level > 0 or "tp" in name or "pp" in name or "zbv" in name or "in s" in name
            if alone and ("weights" not in run.home or run.level == 3):
                yield run


def train(run: Run, folder: str) -> Trace:
    one, trace = CASES[run.case], Trace()
    engine = zero3d.Engine(one.model(), one.loss, one.optimizer, run.options(folder))
    one.story(engine, trace)
    trace.tensors |= {
        f"gradient of {info.name}": engine.grad_of(info.name) for info in engine.parameters if info.trainable
    }
    trace.tensors |= engine.full_state_dict()
    engine.close()
    return trace


def train_all(runs: Sequence[Run], folder: str) -> list[Trace]:
    return [train(run, folder) for run in runs]


def plain(name: str) -> dict[str, Tensor]:
    """The weights of the plain loop on the same global batches."""
    one = CASES[name]
    clip = one.sections.get("optimizer", {}).get("clip_norm", 0.5)
    steps = [[batch] for batch in batches()]
    trace = reference.train(one.model(), tiny.loss, _adamw, steps, call=lambda m, b: m(b["tokens"]), clip=clip)
    return trace.weights


def _adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], **ADAMW)


def assert_same_bits(one: Trace, other: Trace, what: object) -> None:
    """Gradients that are read are but close: on the device the update has scaled them where they are."""
    assert repr(one.numbers) == repr(other.numbers), (what, one.numbers, other.numbers)  # a skipped step's loss is NaN
    assert one.tensors.keys() == other.tensors.keys(), what
    for name, value in one.tensors.items():
        if name.startswith("gradient "):
            torch.testing.assert_close(value, other.tensors[name], rtol=1e-6, atol=1e-30, msg=f"{what} {name}")
        else:
            assert torch.equal(value, other.tensors[name]), (what, name)


def assert_close(one: Trace, weights: Mapping[str, Tensor], what: object) -> float:
    """-> the largest distance of a weight, relative to the largest value of its tensor."""
    distances = {
        name: float((one.tensors[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in weights.items()
    }
    worst = max(distances, key=lambda name: distances[name])
    assert distances[worst] <= 1e-5, (what, worst, distances[worst])
    return distances[worst]
