"""Runs that are saved in one layout and resumed in another, for tests of checkpoints.

    .venv/bin/python -m tests.checkpoint_runs        every layout, level and home into every other, by hand: 49 x 49
                                                     pairs; with words such as 2x2x2-3 only sources of these names

The model has a tied embedding with an odd vocabulary, which is padded over tp, and projections that are cut in both
dims; it has no dropout, as that depends on dp.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero3d
from tests import reference, tiny
from tests.pipeline_runs import adamw, distance
from tests.world import run_ranks
from zero3d.checkpoint.load import Loaded, load
from zero3d.checkpoint.save import save
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.losses import next_token_loss

LAYOUTS = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 1)]
"""dp, tp, pp"""
LARGE = [(8, 1, 1), (2, 2, 2)]
"""By hand alone: 8 ranks."""
LEVELS = [0, 1, 2, 3]
HOMES = ["device", "host"]
TOGETHER = 30
"""Pairs that one start of ranks resumes: each engine leaves threads of its process groups behind."""
BEFORE, AFTER, SAMPLES = 3, 3, 8
"""Steps before the save and after it."""
VOCABULARY = 61


@dataclass(frozen=True)
class Run:
    layout: tuple[int, int, int]
    level: int
    home: str = "device"

    @property
    def world(self) -> int:
        dp, tp, pp = self.layout
        return dp * tp * pp

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.layout))}-{self.level}{'' if self.home == 'device' else f'-{self.home}'}"

    def options(self) -> dict[str, Any]:
        dp, tp, pp = self.layout
        return {
            "parallel": {"dp": dp, "tp": tp, "pp": pp, "micro_batch": SAMPLES // max(dp, 4)},
            "zero": {"level": self.level, "bucket_mb": 0.02, "reduce": "step"},
            "offload": {"optimizer": self.home},
        }


@dataclass
class Trace:
    """Of the steps after the save."""

    losses: list[float]
    weights: dict[str, Tensor]
    loaded: Loaded | None = None


def made() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=VOCABULARY, sequence_length=tiny.LENGTH, width=32, layers=4, heads=4, tied=True))


def loss(logits: Any, batch: dict[str, Tensor]) -> Any:
    return zero3d.cross_entropy(logits, batch["targets"])


def batches() -> list[dict[str, Tensor]]:
    found = tiny.batches(BEFORE + AFTER, SAMPLES)
    for batch in found:
        batch["tokens"] %= VOCABULARY
        batch["targets"] = torch.where(batch["targets"] < 0, batch["targets"], batch["targets"] % VOCABULARY)
    return found


def train(engine: zero3d.Engine, some: Iterable[Any]) -> list[float]:
    return [engine.step(tiny.part(batch, engine.dp_index, engine.dp_size)).loss for batch in some]


def saved(engine: zero3d.Engine, folder: Path, **options: Any) -> Path:
    return save(engine._parts, engine._mesh, folder, **options)


def resumed(engine: zero3d.Engine, folder: Path, **options: Any) -> Loaded:
    """Loads, and counts on from there."""
    loaded = load(engine._parts, engine._mesh, folder, **options)
    engine._steps = engine._updates = loaded.step
    return loaded


def save_all(folder: Path, runs: Sequence[Run]) -> list[Trace]:
    """Each trains, saves in a folder of its own, and goes on."""
    traces = []
    for run in runs:
        engine = zero3d.Engine(made(), loss, adamw, run.options())
        train(engine, batches()[:BEFORE])
        saved(engine, folder / run.name, step=BEFORE)
        traces.append(Trace(train(engine, batches()[BEFORE:]), engine.full_state_dict()))
        engine.close()
    return traces


def resume_all(folder: Path, pairs: Sequence[tuple[Run, Run]]) -> list[Trace]:
    """Each goes on in the second of its runs from what the first one saved."""
    traces = []
    for source, run in pairs:
        engine = zero3d.Engine(made(), loss, adamw, run.options())
        loaded = resumed(engine, folder / source.name)
        traces.append(Trace(train(engine, batches()[BEFORE:]), engine.full_state_dict(), loaded))
        engine.close()
    return traces


@cache
def plain() -> reference.Trace:
    """All steps in one process, uninterrupted."""
    [found] = run_ranks(1, _in_one_process)
    trace: reference.Trace = found
    return trace


def _in_one_process() -> reference.Trace:
    steps = [[batch] for batch in batches()]
    return reference.train(made(), next_token_loss, adamw, steps, call=lambda model, batch: model(batch["tokens"]))


def check(
    folder: Path,
    pairs: Sequence[tuple[Run, Run]],
    timeout: float = 60,
    tell: Callable[[int, int, int], None] = lambda done, of, world: None,
) -> None:
    """Saves every source, resumes every pair, and compares: in one layout bit by bit with the run that was not
    interrupted (levels change no bit), else within 1e-5 with the plain loop."""
    sources = list(dict.fromkeys(source for source, _ in pairs))
    uninterrupted: dict[Run, Trace] = {}
    for world in sorted({run.world for run in sources}):
        runs = [run for run in sources if run.world == world]
        uninterrupted.update(zip(runs, run_ranks(world, save_all, folder, runs, timeout=timeout)[0]))
    for world in sorted({run.world for _, run in pairs}):
        here = [pair for pair in pairs if pair[1].world == world]
        for start in range(0, len(here), TOGETHER):
            some = here[start : start + TOGETHER]
            traces = run_ranks(world, resume_all, folder, some, timeout=timeout)[0]
            for (source, run), trace in zip(some, traces):
                _compare(source, run, trace, uninterrupted[source])
            tell(start + len(some), len(here), world)


def _compare(source: Run, run: Run, trace: Trace, before: Trace) -> None:
    what = f"{source.name} into {run.name}"
    torch.testing.assert_close(trace.losses, plain().losses[BEFORE:], rtol=1e-5, atol=0, msg=what)
    if source.layout == run.layout:
        assert trace.losses == before.losses, what
    for name, value in trace.weights.items():
        assert distance(value, plain().weights[name]) <= 1e-5, (what, name)
        assert source.layout != run.layout or torch.equal(value, before.weights[name]), (what, name)


def every_pair(names: Sequence[str]) -> list[tuple[Run, Run]]:
    """From sources of these names, or from all."""
    runs = [Run(*one) for one in product([*LAYOUTS, *LARGE], LEVELS, HOMES)]
    runs = [run for run in runs if run.home == "device" or run.level]
    return [(source, run) for source, run in product(runs, runs) if not names or source.name in names]


def _print(done: int, of: int, world: int) -> None:
    print(f"{done} of {of} resumed on {world} ranks", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        check(Path(place), every_pair(sys.argv[1:]), timeout=3000, tell=_print)
    print(f"{len(every_pair(sys.argv[1:]))} pairs are equal")
