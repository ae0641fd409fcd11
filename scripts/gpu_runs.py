"""The runs of gpu_check.py: what each is, what is planned for it, and what it comes to, in a process of its own."""

import gc
import multiprocessing
import os
import statistics
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from zero3d.config import Model, Offload
from zero3d.planner.memory import ModelStates, Widths, states

DEVICE_KINDS = ("weights", "gradients", "optimizer", "activations")
"""Of what an engine holds, where a CPU takes a GPU's place. (Buffers there are the host's too.)"""
WARM_UP = 2
"""Steps before the clock starts: buffers are made in the first, and the second ends what the first began."""
START = 30.0
"""Seconds that a process may take to start, besides what it does."""
PARTING = 10.0
"""The same to end, when all is told."""
HOST = {"optimizer": "host"}

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "level 0": (0, {}),
    "level 1": (1, {}),
    "level 2": (2, {}),
    "level 3": (3, {}),
    "level 2, host": (2, HOST),
    "level 3, host": (3, HOST),
    "level 3, parameters on host": (3, {**HOST, "parameters": "host"}),
    "level 2, host, delayed": (2, {**HOST, "delayed_update": 1}),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A GPT, and what one rank computes of it in a step: `batch` samples of `length` tokens."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    bucket_mb: float = 16.0

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return 12 * self.width**2 + 2 * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.vocabulary * self.width + self.width


def job_of(run: str, size: Size, *, steps: int, cpu: bool, seconds: float, **more: Any) -> dict[str, Any]:
    """What a process is told to do. steps: after those that warm up; seconds: that it may take; limit: bytes that its
    device may give, which are this `fraction` of what a GPU has."""
    return {"run": run, "size": asdict(size), "steps": steps, "cpu": cpu, "seconds": seconds, **more}


def states_of(run: str, size: Size, dp: int) -> ModelStates:
    """Of one rank, by zero3d's planner: bf16 weights and gradients, fp32 Adam."""
    level, offload = RUNS[run]
    return states(size.parameters, level, dp=dp, widths=Widths(), offload=Offload(**offload))


def planned_peak(run: str, size: Size, dp: int) -> int:
    """Bytes: model states, and what a step with recomputed blocks needs besides: the inputs of all blocks, and either
    the logits with their gradient or a block's activations (34 bytes a token and width; attention keeps no scores)
    with the gradients of two blocks' parameters. At level 3 two blocks are whole where they are not all the time."""
    level, offload = RUNS[run]
    tokens = size.batch * size.length
    inputs = 2 * tokens * size.width * size.layers
    logits = 2 * 2 * tokens * size.vocabulary
    block = 34 * tokens * size.width + 2 * 2 * size.block
    comes_and_goes = level == 3 and (dp > 1 or "parameters" in offload)
    gathered = 2 * (2 * size.block + size.vocabulary * size.width) if comes_and_goes else 0
    return states_of(run, size, dp).device + inputs + max(logits, block) + gathered


def answer_to(job: dict[str, Any]) -> dict[str, Any]:
    """What a run came to: {"refused": why} where memory did not suffice, {"error": what} for all else that failed."""
    import torch

    from zero3d.errors import ConfigError

    try:
        return measured(job)
    except torch.OutOfMemoryError:
        return {"refused": "device memory"}
    except ConfigError as error:
        known = "host memory" in str(error)
        return {"refused" if known else "error": str(error)}
    except Exception as error:  # what one run died of is part of the table
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()


def measured(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    import zero3d
    from zero3d.models.losses import next_token_loss

    size = Size(**job["size"])
    level, offload = RUNS[job["run"]]
    on_gpu = not job["cpu"]
    if on_gpu and not torch.cuda.is_available():
        raise RuntimeError("there is no GPU here; --cpu runs the same logic with tiny sizes")
    if on_gpu and "limit" in job:
        torch.cuda.set_per_process_memory_fraction(job["fraction"])
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    settings = {
        "zero": {"level": level, "bucket_mb": size.bucket_mb},
        "offload": offload,
        "optimizer": {"lr": 3e-4, "clip_norm": 1.0},
        "precision": {"compute": "bf16", "gradients": "compute"},
        "recompute": {"mode": "block"},
    }
    before = allocated(device)
    began = perf_counter()
    engine = zero3d.Engine(first_model(size, device), next_token_loss, config=settings)
    device = engine.device
    built_peak, built_seconds = peak(device), perf_counter() - began
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    reports = []
    began = perf_counter()
    for step in range(WARM_UP + job["steps"]):
        if step == WARM_UP:
            finish(device)
            began = perf_counter()
        reports.append(engine.step(batch(size, step, engine.dp_index, device)))
    finish(device)
    seconds = (perf_counter() - began) / max(job["steps"], 1)
    step_peak = peak(device)
    held = {kind: values[engine.rank] for kind, values in engine.held_bytes().items()}
    step_peak = step_peak or sum(held.get(kind, 0) for kind in DEVICE_KINDS)
    dp, name = engine.dp_size, torch.cuda.get_device_name(device) if on_gpu else "cpu"
    engine.close()
    del engine
    gc.collect()
    if not on_gpu and step_peak > job.get("limit", step_peak):
        return {"refused": "device memory"}
    planned = states_of(job["run"], size, dp)
    timed = [one.offload for one in reports[WARM_UP:] if one.offload is not None]
    return {
        "device": name,
        "torch": torch.__version__,
        "level": level,
        "offload": offload,
        "parameters": size.parameters,
        "planned_states": planned.device,
        "held_states": sum(held[kind] for kind in ("weights", "gradients", "optimizer")),
        "planned_peak": planned_peak(job["run"], size, dp),
        "measured_peak": step_peak,
        "built_peak": built_peak,
        "left_after_close": allocated(device) - before,
        "planned_host": planned.host,
        "host": held.get("host", 0),
        "pinned": held.get("staging", 0) if on_gpu else 0,
        "held": held,
        "built_seconds": built_seconds,
        "step_seconds": seconds,
        "tokens_per_second": dp * size.batch * size.length / seconds,
        "split": {
            "compute": statistics.fmean(one.compute_seconds for one in reports[WARM_UP:]) if job["steps"] else 0.0,
            **{
                key: statistics.fmean(getattr(one, key) for one in timed) if timed else 0.0
                for key in ("down", "update", "up", "waited", "hidden")
            },
        },
        "losses": [one.loss for one in reports],
    }


def first_model(size: Size, device: Any) -> Any:
    """What builds the model. Weights are drawn on the device: billions of them would take a CPU most of the time."""
    import torch

    from zero3d.blueprint import Source
    from zero3d.models.presets import build_function

    model = Model(preset="gpt", width=size.width, layers=size.layers, heads=size.heads)

    def drawn(name: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, device=device).mul_(std)

    def values(built: torch.nn.Module) -> Mapping[str, Callable[[], torch.Tensor]]:
        own = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
        stds = {f"{path}.weight": module.std for path, module in built.named_modules() if hasattr(module, "std")}
        return {name: partial(drawn, name, own[name], std) for name, std in stds.items() if name in own}

    return Source(build_function(model, size.vocabulary, size.length), values)


def batch(size: Size, step: int, index: int, device: Any) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.length + 1), generator=generator).to(device)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def finish(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: Any) -> int:
    import torch

    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def peak(device: Any) -> int:
    """0 on a CPU, where nothing counts it."""
    import torch

    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0


def in_processes(
    jobs: Sequence[dict[str, Any]],
    left: Callable[[], float],
    serve: Callable[..., None] | None = None,
    preload: Sequence[str] = ("zero3d.engine", "torch._dynamo"),
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(job, answer) of each, one after the other in one process; after one that hangs or dies a new process goes on.
    left: seconds of time that remain; preload: what processes need not import, each for itself."""
    # Processes are forked from one that has not touched the device.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    waiting = deque(jobs)
    while waiting:
        if left() <= 0:
            yield waiting.popleft(), {"not_reached": "no time was left"}
            continue
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=serve or serve_jobs, args=(theirs, list(waiting)), daemon=True)
        process.start()
        theirs.close()
        alive, first = True, True
        while waiting and alive and left() > 0:
            seconds = min(waiting[0]["seconds"] + (START if first else 0), left())
            alive, answer = heard(mine, seconds)
            first = False
            yield waiting.popleft(), answer
        mine.close()
        process.join(0 if waiting or not alive else PARTING)
        if process.is_alive():
            process.kill()
            process.join()


def heard(end: Connection, seconds: float) -> tuple[bool, dict[str, Any]]:
    """Whether the process goes on, and its answer."""
    if not end.poll(seconds):
        return False, {"error": f"no answer in {seconds:.0f} s"}
    try:
        return True, end.recv()
    except EOFError:
        return False, {"error": "the process ended without an answer (out of host memory?)"}


def serve_jobs(end: Connection, jobs: Sequence[dict[str, Any]]) -> None:
    for job in jobs:
        end.send(answer_to(job))


def in_this_process(
    jobs: Sequence[dict[str, Any]], left: Callable[[], float]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The same where each rank was started by torchrun: all ranks make the same runs."""
    import torch.distributed as dist

    over = False
    for job in jobs:
        yield job, {"not_reached": "no time was left"} if over else answer_to(job)
        told = [left() <= 0]
        dist.broadcast_object_list(told, 0)
        over = told[0]


def device_bytes(left: Callable[[], float]) -> int:
    """Of the first GPU; asked in another process, as this one touches no device."""
    _, answer = next(in_processes([{"seconds": START}], left, serve=tell_device_bytes))
    return int(answer.get("bytes", 0))


def tell_device_bytes(end: Connection, jobs: Sequence[dict[str, Any]]) -> None:
    import torch

    for _ in jobs:
        end.send({"bytes": torch.cuda.get_device_properties(0).total_memory})
