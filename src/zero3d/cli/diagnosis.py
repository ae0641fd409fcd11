"""From what was found on a machine to what works there, what does not, and what to do. Pure."""

from dataclasses import dataclass
from typing import Final, Literal

from zero3d.cli.health import OPTIONAL, PACKAGES, Facts
from zero3d.cli.style import size

OLDEST_PYTHON: Final = (3, 11)
OLDEST_TORCH: Final = (2, 11)
LITTLE_MEMORY: Final = 1 << 30
"""Bytes: two ranks that have loaded torch take about this."""
LITTLE_SHARED: Final = 1 << 30
"""NCCL keeps its buffers between the GPUs of a machine there."""
LITTLE_DISK: Final = 1 << 30
PARAMETER_BYTES: Final = 18
"""fp16 weights and gradients of mixed-precision Adam, 16, and the gradient's sum."""

Verdict = Literal["good", "note", "bad"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A row of the screen. bad: training is impossible; note: something is, or is slow; `todo`: what to do then."""

    name: str
    value: str
    verdict: Verdict = "good"
    todo: str = ""


def findings(facts: Facts) -> list[Finding]:
    """What was found, in the order of the screen."""
    return [*_software(facts), *_hardware(facts), *_network(facts), *_places(facts)]


def abilities(facts: Facts) -> list[Finding]:
    """What can be done here: `value` says how far, `todo` how to get it."""
    if facts.torch_error:
        return []
    gpus, cores, versions = len(facts.gpus), facts.cores, facts.versions
    free = facts.memory.available if facts.memory else None
    extras = {
        "Transformers models": "transformers",
        "own tokenizers": "tokenizers",
        "TensorBoard files": "tensorboard",
        "figures of zero3d report": "plotly",
        "checkpoints at URLs": "fsspec",
    }
    return [
        Finding(name="training", value=f"{gpus} ranks, one a GPU" if gpus else f"CPU ranks, one a core: {cores}"),
        Finding(
            name="offload to the host",
            value=f"about {free / PARAMETER_BYTES / 1e9:.2g} billion parameters on this machine" if free else "unknown",
        ),
        Finding(name="bf16", value="at full speed", verdict="good")
        if facts.native_bf16
        else Finding(
            name="bf16", value="as storage alone", verdict="note", todo='precision.compute = "auto" takes fp32.'
        ),
        *(
            Finding(name=what, value="yes")
            if package in versions
            else Finding(
                name=what, value="no", verdict="note", todo=f'pip install "zero3d[{OPTIONAL[package]}]" adds it.'
            )
            for what, package in extras.items()
        ),
        Finding(name="torch.compile", value="yes")
        if facts.compiler
        else Finding(name="torch.compile", value="no compiler", verdict="note", todo="Nothing of zero3d needs one."),
    ]


def _software(facts: Facts) -> list[Finding]:
    python = ".".join(map(str, facts.python))
    old = facts.python[:2] < OLDEST_PYTHON
    missing = [name for name in PACKAGES if name not in facts.versions and name != "torch"]
    rows = [
        Finding(
            name="Python",
            value=f"{python} on {facts.system}",
            verdict="bad" if old else "good",
            todo="Use Python 3.11 or newer." if old else "",
        ),
        _torch(facts),
        Finding(
            name="packages",
            value=", ".join(f"{name} {one}" for name, one in facts.versions.items() if name != "torch"),
            verdict="bad" if missing else "good",
            todo=f"pip install {' '.join(missing)}" if missing else "",
        ),
    ]
    if facts.torch_error:
        return rows
    ready = "gloo" in facts.back_ends
    quiet = facts.gpus and "nccl" not in facts.back_ends
    return [
        *rows,
        Finding(
            name="back ends",
            value=", ".join(facts.back_ends) or "none",
            verdict="good" if ready and not quiet else "bad",
            todo="" if ready and not quiet else "Install a torch that is built with gloo, and for GPUs with nccl.",
        ),
    ]


def _torch(facts: Facts) -> Finding:
    found = facts.versions.get("torch")
    if facts.torch_error or found is None:
        return Finding(
            name="torch",
            value=facts.torch_error or "not installed",
            verdict="bad",
            todo="pip install torch, and see that python -c 'import torch' works.",
        )
    numbers = tuple(int(part) for part in found.partition("+")[0].split(".")[:2] if part.isdigit())
    old = numbers < OLDEST_TORCH
    built = f"CUDA {facts.cuda}" if facts.cuda else "for the CPU"
    return Finding(
        name="torch",
        value=f"{found}, built {'with ' if facts.cuda else ''}{built}",
        verdict="bad" if old else "good",
        todo='pip install "torch>=2.11"' if old else "",
    )


def _hardware(facts: Facts) -> list[Finding]:
    quota = facts.cpu_quota
    slow = quota is not None and quota < facts.cores
    known = [one for one in (facts.memory, facts.process_memory) if one is not None]
    least = min(known, default=None)
    little = least is not None and least.available < LITTLE_MEMORY
    rows = [
        Finding(
            name="cores",
            value=f"{facts.cores}" + (f", of which the container gives {quota:g} at a time" if slow else ""),
            verdict="note" if slow else "good",
            todo=f"Start at most {max(int(quota or 1), 1)} ranks (-n)." if slow else "",
        ),
        Finding(
            name="memory",
            value=f"{size(least.available)} free ({least.name})" if least else "unknown",
            verdict="note" if little else "good",
            todo="Two ranks of torch alone take about 1 GB: free some, or raise the limit." if little else "",
        ),
    ]
    for number, gpu in enumerate(facts.gpus):
        used = gpu.free < 0.9 * gpu.memory
        rows.append(
            Finding(
                name=f"GPU {number}",
                value=f"{gpu.name}, {size(gpu.free)} free of {size(gpu.memory)}",
                verdict="note" if used else "good",
                todo="Somebody else has memory there; nvidia-smi says who." if used else "",
            )
        )
    if not facts.gpus:
        hidden = facts.cuda is not None
        rows.append(
            Finding(
                name="GPUs",
                value="none" if not hidden else f"none that torch's CUDA {facts.cuda} can use",
                verdict="note" if hidden else "good",
                todo="See nvidia-smi: the driver may be older, or CUDA_VISIBLE_DEVICES hides them." if hidden else "",
            )
        )
    return rows


def _network(facts: Facts) -> list[Finding]:
    shown = "; ".join(f"{name} {', '.join(one)}".strip() for name, one in facts.interfaces.items() if one)
    return [
        Finding(name="interfaces", value=shown or "none"),
        Finding(
            name="on one machine",
            value=f"ranks use {facts.loopback}" if facts.loopback else "no loopback interface",
            verdict="good" if facts.loopback else "bad",
            todo="" if facts.loopback else "Bring lo up: ranks of one machine meet there.",
        ),
        Finding(
            name="across machines",
            value=f"ranks use {facts.across}"
            if facts.across
            else facts.across_problem.splitlines()[0]
            if facts.across_problem
            else "depends on the address at which ranks meet",
            verdict="note" if facts.across_problem else "good",
            todo=facts.across_problem.partition("\n")[2],
        ),
    ]


def _places(facts: Facts) -> list[Finding]:
    rows = []
    if facts.shared_memory is not None:
        small = bool(facts.gpus) and facts.shared_memory < LITTLE_SHARED
        rows.append(
            Finding(
                name="shared memory",
                value=f"{size(facts.shared_memory)} free",
                verdict="note" if small else "good",
                todo="NCCL wants more: start the container with --shm-size=4g." if small else "",
            )
        )
    for name, free in (("temporary files", facts.temporary), ("this folder", facts.here)):
        full = free is not None and free < LITTLE_DISK
        closed = name == "this folder" and not facts.writable
        rows.append(
            Finding(
                name=name,
                value=("unknown" if free is None else f"{size(free)} free") + (", not writable" if closed else ""),
                verdict="note" if full or closed else "good",
                todo="Set run.out to a folder that is yours." if closed else "Free some space." if full else "",
            )
        )
    return rows
