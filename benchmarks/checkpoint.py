"""Checkpoints beside torch.distributed.checkpoint and beside the disk itself.

    python benchmarks/checkpoint.py [--rounds 5] [--parts save load pause] [--json] [--small]

A GPT of 88 million parameters (`--small`: 10 million) with AdamW's state, fp32: 1.06 GB, on 2 ranks. `zero3` and
`zero1` are engines at these levels; `dcp` is torch's, of a model under fully_shard, whose files it syncs by default;
`raw` are as many bytes that both processes write, or read, with nothing else to do. It prints a
table, or with `--json` one line.

save    until all is on the disk and whole; files of the round before are gone, and the disk is idle
load    into the model that trains, after the files' pages have been dropped from memory
return  of a save in the background: until the call returns
pause   the same, and with it what the next `--steps` steps take longer than as many before it and after it

In each round each makes one, in an order drawn anew; a ratio is the median over rounds of two of the same round, and
`ratios` are its quartiles; of pauses, which are small differences of long times, it is that of the medians. A loss
after loading that is not the one before makes the run void.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pipeline import SIZE, SMALL
from step import Batch, adamw, build, quartiles, torchrun
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero3d
from zero3d.models.losses import next_token_loss

RANKS = 2
LENGTH = 64
"""Tokens of a micro-batch: steps are to be short beside a save."""
PARTS = ("save", "load", "pause")
PORTION = 1 << 22
"""Bytes that raw writing and reading take at a time."""
WANTED = {
    "save zero3/raw": 1.1,
    "save zero1/raw": 1.1,
    "save zero3/dcp": 1.0,
    "save zero1/dcp": 1.0,
    "load zero3/dcp": 0.6,
    "load zero1/dcp": 0.6,
    "return zero3/dcp": 0.4,
    "return zero1/dcp": 0.4,
    "pause zero3/dcp": 0.4,
    "pause zero1/dcp": 0.4,
}
Times = dict[str, dict[str, list[float]]]
"""Part -> contender -> seconds, round by round."""


class Ours:
    """An engine."""

    def __init__(self, options: argparse.Namespace, level: int) -> None:
        config = {"zero": {"level": level}, "parallel": {"micro_batch": 1}}
        self._engine = zero3d.Engine(build(options), next_token_loss, adamw, config)

    def step(self, batch: Batch) -> None:
        self._engine.step(batch)

    def loss(self, batch: Batch) -> float:
        return self._engine.evaluate(batch).loss

    def save(self, folder: Path) -> None:
        self._engine.save(folder)

    def load(self, folder: Path) -> None:
        self._engine.load(folder)

    def begin(self, folder: Path) -> None:
        self._engine.save(folder, background=True)

    def finish(self) -> None:
        self._engine.finish_saving()


class Theirs:
    """torch.distributed.checkpoint, of a model under fully_shard."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._model = build(options)
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in self._model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = adamw(self._model.parameters())
        self._group = dist.new_group(backend="gloo")  # Of its thread's own: the steps' calls go on meanwhile.
        self._going: Any = None

    def step(self, batch: Batch) -> None:
        total, count = next_token_loss(self._model(batch["tokens"]), batch)
        (total / count).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def loss(self, batch: Batch) -> float:
        total, count = next_token_loss(self._model(batch["tokens"]), batch)
        return float(total / count)

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), storage_writer=dcp.FileSystemWriter(folder))

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def begin(self, folder: Path) -> None:
        writer = dcp.FileSystemWriter(folder)
        self._going = dcp.async_save(self._state(), storage_writer=writer, process_group=self._group)

    def finish(self) -> None:
        self._going.result()

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


class Raw:
    """The same number of bytes, half of them by each process."""

    def __init__(self, nbytes: int) -> None:
        self._data = memoryview(torch.randint(0, 255, (nbytes,), dtype=torch.uint8).numpy())

    def save(self, folder: Path) -> None:
        with open(folder / f"raw-{dist.get_rank()}", "wb", buffering=0) as file:
            for start in range(0, len(self._data), PORTION):
                file.write(self._data[start : start + PORTION])
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        buffer = memoryview(bytearray(PORTION))
        with open(folder / f"raw-{dist.get_rank()}", "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


Contender = Ours | Theirs


class Bench:
    """All contenders of this rank. place: a folder that all ranks reach."""

    def __init__(self, options: argparse.Namespace, place: Path) -> None:
        self._options = options
        self._place = place
        self._contenders: dict[str, Contender] = {
            "zero3": Ours(options, 3),
            "zero1": Ours(options, 1),
            "dcp": Theirs(options),
        }
        self.batch = batch_of(options)
        self.losses: dict[str, list[float]] = {}
        for name, one in self._contenders.items():
            one.step(self.batch)
            self.losses[name] = [one.loss(self.batch)]
        numel = sum(parameter.numel() for parameter in build(options).parameters())
        self.nbytes = 3 * 4 * numel
        self._raw = Raw(self.nbytes // RANKS)
        self.times: Times = {part: {} for part in options.parts}
        if "pause" in options.parts:
            self.times["return"] = {}

    def run(self) -> None:
        everyone: dict[str, Contender | Raw] = {**self._contenders, "raw": self._raw}
        if "load" in self._options.parts:
            for name, one in everyone.items():
                one.save(self._made(f"kept-{name}"))
                synced()
        for number in range(-1, self._options.rounds):  # One before they count.
            for part in self._options.parts:
                for name in random.Random(f"{number} {part}").sample(list(everyone), len(everyone)):
                    if not (part == "pause" and name == "raw"):
                        found = getattr(self, f"_{part}")(name, everyone[name])
                        for what, seconds in found.items() if number >= 0 else ():
                            self.times[what].setdefault(name, []).append(seconds)

    def _save(self, name: str, one: Contender | Raw) -> dict[str, float]:
        folder = self._made(name)
        seconds = timed(lambda: one.save(folder))
        self._gone(folder)
        return {"save": seconds}

    def _load(self, name: str, one: Contender | Raw) -> dict[str, float]:
        folder = self._place / f"kept-{name}"
        if dist.get_rank() == 0:
            dropped(folder)
        seconds = timed(lambda: one.load(folder))
        if not isinstance(one, Raw):
            self.losses[name].append(one.loss(self.batch))
        return {"load": seconds}

    def _pause(self, name: str, one: Contender) -> dict[str, float]:
        folder = self._made(name)
        one.step(self.batch)
        usual = [timed(lambda: self._steps(one))]
        began = timed(lambda: one.begin(folder))
        after = timed(lambda: self._steps(one))
        one.finish()
        self._gone(folder)
        usual.append(timed(lambda: self._steps(one)))
        return {"return": began, "pause": began + after - statistics.mean(usual)}

    def _steps(self, one: Contender) -> None:
        for _ in range(self._options.steps):
            one.step(self.batch)

    def _made(self, name: str) -> Path:
        folder = self._place / name
        folder.mkdir(exist_ok=True)
        return folder

    def _gone(self, folder: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        synced()


def main() -> None:
    options = arguments()
    if "RANK" not in os.environ:
        sys.exit(start_ranks())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        place = [own]
        dist.broadcast_object_list(place)
        bench = Bench(options, Path(place[0]))
        bench.run()
        dist.barrier()
    if dist.get_rank() == 0:
        found = summary(options, bench)
        print(json.dumps(found) if options.json else table(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="after a save in the background begins")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--folder", help="on the disk that is to be measured; else the system's temporary one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--small", action="store_true", help="a model of 10 million parameters")
    options = parser.parse_args()
    vars(options).update({**(SMALL if options.small else SIZE), "length": LENGTH})
    return options


def start_ranks() -> int:
    words, environment = torchrun(RANKS, *sys.argv)
    return subprocess.run(words, env=environment, check=False).returncode


def batch_of(options: argparse.Namespace) -> Batch:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, options.vocabulary, (1, options.length + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def timed(work: Callable[[], object]) -> float:
    """Seconds until all ranks are through."""
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def synced() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def dropped(folder: Path) -> None:
    """The pages of all files leave the system's memory; they have been written."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def summary(options: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    apart = {name: max(abs(one - losses[0]) for one in losses) for name, losses in bench.losses.items()}
    ratios: dict[str, list[float]] = {}
    of_medians: dict[str, float] = {}
    for pair in WANTED:
        part, ours, other = pair.replace("/", " ").split()
        times = bench.times.get(part, {})
        if times:
            ratios[pair] = [one / two for one, two in zip(times[ours], times[other])]
        if times and part == "pause":
            of_medians[pair] = round(statistics.median(times[ours]) / statistics.median(times[other]), 3)
    return {
        "benchmark": "checkpoint",
        "ranks": RANKS,
        "megabytes": round(bench.nbytes / 1e6),
        "rounds": options.rounds,
        "torch": torch.__version__,
        "median_s": {part: medians(times) for part, times in bench.times.items()},
        "ratio": medians(ratios) | of_medians,
        "ratios": {pair: quartiles(found) for pair, found in ratios.items()},
        "wanted": {pair: most for pair, most in WANTED.items() if pair in ratios},
        "void": any(apart.values()),
    }


def medians(times: Mapping[str, Iterable[float]]) -> dict[str, float]:
    return {name: round(statistics.median(found), 3) for name, found in times.items()}


def table(found: Mapping[str, Any]) -> str:
    lines = [f"{found['megabytes']} MB, {found['ranks']} ranks, {found['rounds']} rounds; medians in seconds"]
    for part, times in found["median_s"].items():
        lines.append(f"  {part:6}" + "".join(f"  {name} {seconds:.2f}" for name, seconds in times.items()))
    for pair, ratio in found["ratio"].items():
        low, *_, high = found["ratios"][pair]
        lines.append(f"  {pair:16} {ratio:5.2f}  ({low:.2f} to {high:.2f})  wanted: at most {found['wanted'][pair]}")
    return "\n".join([*lines, *(["void: losses after loading differ"] if found["void"] else [])])


if __name__ == "__main__":
    main()
