"""`zero3d plan --model llama3-70b --devices 512 --device H100`: the fastest layouts that fit, and why the others lost.

Starts no ranks: one block of the model is counted on tensors without data, all else is arithmetic.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zero3d.cli.checks import TO_FILL_IN
from zero3d.cli.options import AllowCode, AsJson
from zero3d.cli.out_file import check_out, write_out
from zero3d.cli.reporting import reporting_errors
from zero3d.cli.style import size
from zero3d.config import Config
from zero3d.errors import UsageError
from zero3d.planner.hardware import Cluster, find

if TYPE_CHECKING:
    from zero3d.cli.plan_model import Asked
    from zero3d.planner.judge import Aim, Plan
    from zero3d.planner.least import Least, Smallest
    from zero3d.planner.neighbours import Neighbour
    from zero3d.planner.search import Found

FILE_WIDTH = 120
"""Columns where the output is no terminal."""
MOST_DEVICES = 1 << 17
MOST_SAMPLES = 10_000_000
HOST_GB = (0.001, 1e9)
"""Of one machine, the least and the most."""
SAMPLES = 4
"""Of a device in a step, where nobody says how large the global batch is."""
SLOW = 2.0
"""Seconds after which it says what it does."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that was found. least: where nothing fits"""

    asked: "Asked"
    aim: "Aim"
    sequence: int
    found: "Found"
    configs: "list[Config]"
    around: "list[Neighbour]"
    least: "Least | None" = None
    assumed: tuple[str, ...] = ()


def command(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="M",
            help="A public model such as llama3-70b, a folder with a config.json, a CONFIG.toml, or module:function.",
        ),
    ],
    devices: Annotated[
        int, typer.Option("--devices", min=1, max=MOST_DEVICES, metavar="N", help="How many there are.")
    ],
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="KIND", help="H100-80GB, A100-80GB, CPU ..., or the file that zero3d calibrate wrote."
        ),
    ],
    per_node: Annotated[
        int | None, typer.Option("--per-node", min=1, help="Devices of one machine. Left out: as KIND has.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            min=1,
            max=MOST_SAMPLES,
            help="Samples of a step. Left out: as CONFIG says, or 4 a device.",
        ),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option("--sequence", min=1, help="Tokens of a sample. Left out: as the model has.")
    ] = None,
    host_memory: Annotated[
        float | None,
        typer.Option("--host-memory", metavar="GB", help="Of one machine. Left out: as KIND has."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.toml", help="Write the best plan as a CONFIG.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="How many plans to show.")] = 10,
    as_json: AsJson = False,
    allow_code: AllowCode = False,
) -> None:
    """Search the layouts of a model on a cluster: the fastest that fit, before anything is started."""

    def work() -> None:
        if not model.strip():
            raise UsageError("--model is empty", hint="Name one, such as --model llama3-8b, or a folder.")
        cluster = cluster_of(device, devices, per_node, host_memory)
        if out is not None:
            check_out(out, suffix=".toml", what="a CONFIG is TOML")
        found = planned(
            model,
            cluster,
            devices,
            global_batch=global_batch,
            sequence=sequence,
            top=top,
            machine=per_node or find(device).per_node,
            allow_code=allow_code,
            progress=_progress(),
        )
        if out is not None and found.configs:
            write_out(out, config_text(found))
        _tell(found, out, as_json=as_json)

    raise typer.Exit(reporting_errors(work, as_json=as_json))


def cluster_of(device: str, devices: int, per_node: int | None, host_memory: float | None) -> Cluster:
    """Raises `UsageError` for an unknown KIND, devices that are no whole machines, and memory that no machine has."""
    if host_memory is not None and not HOST_GB[0] <= host_memory <= HOST_GB[1]:
        raise UsageError(
            f"--host-memory {host_memory:g} is not from {HOST_GB[0]:g} to {HOST_GB[1]:g} GB",
            hint="Give the GB of one machine, such as --host-memory 512.",
        )
    cluster = find(device)
    chosen = per_node or cluster.per_node
    if devices > chosen and devices % chosen:
        below = devices - devices % chosen
        raise UsageError(
            f"--devices {devices} are no whole machines of {chosen}: {devices % chosen} are left",
            hint=f"Use {below} or {below + chosen} devices, or --per-node.",
        )
    host = cluster.host if host_memory is None else cluster.host.model_copy(update={"memory": host_memory * 1e9})
    return cluster.with_changes(per_node=min(chosen, devices), host=host)


def planned(
    model: str,
    cluster: Cluster,
    devices: int,
    *,
    global_batch: int | None = None,
    sequence: int | None = None,
    top: int = 10,
    machine: int | None = None,
    allow_code: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """What `zero3d plan` tells; machine: devices that one can have.

    Raises `UsageError` and `ConfigError` for what cannot be planned.
    """
    from zero3d.calibrate.profile import UNSTEADY
    from zero3d.cli.plan_model import asked as model_of
    from zero3d.planner.judge import HOST_RESERVE, RESERVE, Aim, sent
    from zero3d.planner.least import least
    from zero3d.planner.neighbours import improved
    from zero3d.planner.search import search

    asked = model_of(model, sequence, allow_code=allow_code)
    tokens = sequence or asked.sequence
    if tokens > asked.longest:
        raise UsageError(
            f"--sequence {tokens}: {asked.name} takes up to {asked.longest} tokens",
            hint=f"Use --sequence {asked.longest} or less.",
        )
    dtype = asked.dtype or dtype_of(cluster)
    cluster.device.peak(dtype)
    batch = global_batch or asked.global_batch or SAMPLES * devices

    def aim_of(length: int) -> Aim:
        workload = asked.workload(dtype, length)
        return Aim(
            cluster=cluster,
            devices=devices,
            global_batch=batch,
            dtype=dtype,
            workload=workload,
            blocks=len(workload(1, False).order),
            host_memory=cluster.host.memory,
            machine=machine or cluster.per_node,
        )

    progress(f"counting what {asked.name} computes and holds")
    aim = aim_of(tokens)
    found = search(aim, top=top, progress=progress)
    around: list[Neighbour] = []
    nothing: Least | None = None
    if found.plans:
        progress("looking at the neighbours of the best")
        best, around = improved(aim, found.plans[0])
        others = [plan for plan in found.plans if plan.choice != best.choice]
        found = replace(found, plans=[best, *others][:top])
    else:
        progress("looking for the least that would fit")
        nothing = least(aim, aim_of, tokens)
    configs = [config_of(asked, plan, dtype, tokens, batch) for plan in found.plans]
    plans = [replace(plan, sent=sent(aim, plan.choice)) for plan in found.plans]
    whose = "" if global_batch or asked.global_batch else f" ({SAMPLES} a device, as --global-batch is left out)"
    assumed: tuple[str, ...] = (
        f"{devices} x {cluster.device.name}, {cluster.per_node} a machine; {RESERVE:.0%} of a device's memory are left "
        f"to the driver, libraries and holes, and {HOST_RESERVE:.0%} of its machine's {size(cluster.host.memory)}.",
        f"Weights and products in {dtype}, sums of gradients, master weights and AdamW's moments in fp32; samples of "
        f"{tokens:,} tokens, {batch:,} of them a step{whose}.",
        f"Rates: {cluster.device.rates.matrix:.0%} of the peak for large products, "
        f"{cluster.device.rates.of(dtype).moving:.0%} of the memory's bandwidth, "
        f"{cluster.device.rates.link:.0%} of links'.",
    )
    if cluster.spread > UNSTEADY:
        assumed += (
            f"Of the profile: timings varied by {cluster.spread:.0%}, as other programs ran, so calibrate again.",
        )
    return Outcome(
        asked=asked,
        aim=aim,
        sequence=tokens,
        found=replace(found, plans=plans),
        configs=configs,
        around=around,
        least=nothing,
        assumed=assumed,
    )


def dtype_of(cluster: Cluster) -> str:
    """The 16-bit one that is fastest, or fp32 where none is faster."""
    flops = cluster.device.flops
    best = max((one for one in ("bf16", "fp16") if one in flops), key=lambda one: flops[one], default="fp32")
    return best if flops.get(best, 0) > flops.get("fp32", 0) else "fp32"


def sections_of(asked: "Asked", plan: "Plan", dtype: str, tokens: int, batch: int) -> dict[str, dict[str, Any]]:
    """What `train` and `dryrun` take; a model.path that they refuse until it is filled in, where [model] has no key for
    the model."""
    sections = {name: dict(keys) for name, keys in asked.sections.items()}
    if to_fill_in(asked):
        sections["model"] = {"path": TO_FILL_IN}
    chosen = plan.choice.sections(dtype)
    data = {"sequence_length": tokens, "global_batch": batch}
    for name, keys in {**chosen, "data": data}.items():
        sections[name] = {**sections.get(name, {}), **keys}
    return sections


def to_fill_in(asked: "Asked") -> bool:
    """Whether the model is neither a CONFIG's, which has a global batch, nor one that [model] can name."""
    return asked.global_batch is None and "model" not in asked.sections


def config_of(asked: "Asked", plan: "Plan", dtype: str, tokens: int, batch: int) -> Config:
    """The plan's configuration, checked."""
    return Config.load(sections_of(asked, plan, dtype, tokens, batch)).resolved(plan.choice.devices, native_bf16=True)


def config_text(outcome: Outcome) -> str:
    """The best plan's CONFIG, with what it was planned for."""
    from zero3d.config_io import write_toml

    best, aim = outcome.found.plans[0], outcome.aim
    sections = sections_of(outcome.asked, best, aim.dtype, outcome.sequence, aim.global_batch)
    time = best.time
    told = [
        f"zero3d plan of {outcome.asked.name} on {aim.devices} x {aim.cluster.device.name}:",
        f"{time.tokens_per_second:,.0f} tokens/s, {time.seconds:.3g} s a step, MFU {time.mfu:.1%}, "
        f"{size(best.footprint.total)} on a device",
        *outcome.asked.notes,
    ]
    return "".join(f"# {line}\n" for line in told) + "\n" + write_toml(sections, {})


def _progress() -> Callable[[str], None]:
    """On stderr, once it has taken a while."""
    began = time.monotonic()

    def tell(text: str) -> None:
        if time.monotonic() - began > SLOW:
            print(f"planning: {text} ...", file=sys.stderr, flush=True)

    return tell


def _tell(outcome: Outcome, out: Path | None, *, as_json: bool) -> None:
    from rich.console import Console

    from zero3d.cli.plan_tables import as_event, parts

    if as_json:
        print(json.dumps(as_event(outcome, out)), flush=True)
    else:
        console = Console()
        if not console.is_terminal:
            console.width = FILE_WIDTH
        for part in parts(outcome):
            console.print(part, highlight=False, markup=False, emoji=False)
        if out is not None and outcome.configs:
            more = (
                " Its model.path is to be filled in: until then train refuses it." if to_fill_in(outcome.asked) else ""
            )
            console.print(f"The best plan is in {out}.{more}", highlight=False, markup=False)
    if not outcome.found.plans:
        raise nothing_fits(outcome)


def nothing_fits(outcome: Outcome) -> UsageError:
    """With the least that would."""
    from zero3d.planner.judge import HOST_RESERVE, RESERVE

    aim, found = outcome.aim, outcome.least
    where = f"{aim.devices} x {aim.cluster.device.name}"
    if found is None or found.smallest is None:
        return UsageError(
            f"no layout of {outcome.asked.name} is possible on {where}", hint="The rejected ones say why."
        )

    def devices_of(one: "Smallest") -> str:
        return f"devices of {upward(one.footprint.total / (1 - RESERVE))}"

    least, ranks = found.smallest, min(aim.cluster.per_node, aim.devices)
    machine = least.host_bytes * ranks / (1 - HOST_RESERVE)
    machines = f"machines of {upward(machine)} of memory (--host-memory {math.ceil(machine / 1e9)})"
    ways = [f"{what} ({size(way.footprint.total)} a device)" for what, way in found.ways]
    if found.in_host is not None:
        ways.append(devices_of(found.in_host))
    if not least.fits_host:
        ways.append(machines if least.fits_device else f"{devices_of(least)} and {machines}")
    host = (
        f" and {size(least.host_bytes * ranks)} of the {size(aim.host_of_rank * ranks)} that a run may take of each "
        f"machine's {size(aim.host_memory)}"
        if least.host_bytes
        else ""
    )
    return UsageError(
        f"nothing fits {where}: the least, {_words(least)}, takes {size(least.footprint.total)} of a device's "
        f"{size(aim.memory)}{host}",
        hint="What would do: " + "; ".join(ways) + "." if ways else "Nothing that was tried would do.",
    )


def upward(num_bytes: float) -> str:
    """A size that is no less.

    >>> upward(1.4158e12), upward(2e9)
    ('1.42 TB', '2.00 GB')
    """
    step = 10.0 ** (math.floor(math.log10(num_bytes)) - 2)
    return size(math.ceil(num_bytes / step - 1e-9) * step)


def _words(least: "Smallest") -> str:
    choice = least.choice
    told = f"dp {choice.dp} x tp {choice.tp} x pp {choice.pp} at level {choice.level}, one sample at a time, recomputed"
    return told if choice.offload == "none" else f"{told}, {choice.offload} on the host"
