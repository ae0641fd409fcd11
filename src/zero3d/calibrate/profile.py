"""A profile: a `planner.hardware.Cluster` with measured numbers in the place of makers' figures. Pure.

The peaks of a profile are what large products reach here, so `rates.matrix` is 1 and an MFU is relative to that. A
link's bandwidth is that of one rank that sends to another, or of collectives where these are faster.
"""

from collections.abc import Iterator

from zero3d.calibrate import fit
from zero3d.calibrate.measured import Measured, Message
from zero3d.planner.hardware import PRESETS, Cluster, Device, Host, Link, Rates

UNSTEADY = 0.25
"""A spread of repeated timings above it is worth a word."""
SLOW_16_BIT = 0.5
"""Of the fp32 rate: below it 16-bit products cost more than they save."""
UPDATED = 28
"""Bytes of a parameter that `host.update` reads and writes."""
LEAST_PART = 1e-3
COLLECTIVES = ("all-gather", "reduce-scatter")


def cluster_of(measured: Measured) -> Cluster:
    """What the planner takes. What nobody measured (links of one rank, links between nodes) is as the notes say."""
    machine, products = measured.machine, fit.products(measured.products)
    preset = PRESETS["CPU"]
    inside, across, reached = _links(measured, preset)
    by_dtype = {
        dtype: {
            "half": one.half,
            "attention": _part(measured.attention[dtype] / one.peak),
            "moving": _part(measured.moving[dtype] / measured.stream),
        }
        for dtype, one in products.items()
    }
    common = by_dtype.get("fp32", next(iter(by_dtype.values())))
    rates = {
        "matrix": 1.0,
        **common,
        "by_dtype": by_dtype,
        "skew": measured.skew,
        **reached,
    }
    if machine.kind == "cpu":  # There the host's update is the device's.
        rates["streaming"] = _part(measured.update * UPDATED / machine.per_node / measured.stream)
        if machine.threads * machine.per_node >= machine.cores:  # What sends takes the time of what computes.
            rates["hidden"] = LEAST_PART
    return Cluster(
        device=Device(
            name=machine.device,
            flops={dtype: one.peak for dtype, one in products.items()},
            memory=machine.memory,
            bandwidth=measured.stream,
            launch=measured.launch,
            rates=Rates.model_validate({**preset.device.rates.model_dump(), **rates}),
        ),
        per_node=machine.per_node,
        inside=inside,
        across=across,
        host=Host(memory=machine.host_memory, cores=machine.cores, update=measured.update, copy_rate=measured.copy),
        spread=measured.spread,
    )


def _links(measured: Measured, preset: Cluster) -> tuple[Link, Link, dict[str, float]]:
    """Inside, across, and what is reached of a link's bandwidth: by collectives of a whole node, and by a message."""
    per_node = measured.machine.per_node
    inside, across = (_messages(measured, across=where) for where in (False, True))
    together = fit.line([one for one in inside if one.verb in COLLECTIVES and one.ranks == per_node])
    if together is None:
        found, reached = preset.inside, {}
    else:
        one = fit.line([one for one in inside if one.verb == "send"]) or together
        bandwidth = max(one.bandwidth, together.bandwidth)
        # A collective's smallest call is N - 1 steps of a ring to the planner.
        found = Link(latency=together.latency / (per_node - 1), bandwidth=bandwidth)
        reached = {
            "link": _part(together.bandwidth / bandwidth),
            "pair": _part(one.bandwidth / bandwidth),
            "hop": one.latency,
        }
    nodes = fit.line([one for one in across if one.verb in COLLECTIVES])
    if nodes is None:
        return found, found, reached
    steps = measured.machine.world // per_node - 1
    bandwidth = nodes.bandwidth / reached.get("link", preset.device.rates.link)
    return found, Link(latency=nodes.latency / steps, bandwidth=bandwidth), reached


def notes(measured: Measured) -> list[str]:
    """What is odd here, or was not measured: sentences for people."""
    return list(_notes(measured))


def _notes(measured: Measured) -> Iterator[str]:
    machine = measured.machine
    peaks = {dtype: one.peak for dtype, one in fit.products(measured.products).items()}
    slow = {
        dtype: peaks["fp32"] / peak
        for dtype, peak in peaks.items()
        if "fp32" in peaks and peak < SLOW_16_BIT * peaks["fp32"]
    }
    if slow:
        told = " and ".join(f"{dtype} {times:.0f} times" for dtype, times in slow.items())
        fastest = max(peaks, key=lambda dtype: peaks[dtype])
        yield (
            f"Products are slower than in fp32: {told}, as this {_kind(measured)} has no instructions for them; "
            f'precision.compute = "{fastest}" is the fastest here.'
        )
    missing = [dtype for dtype in ("fp32", "bf16", "fp16") if dtype not in peaks]
    if missing:
        yield f"Products in {' and '.join(missing)} were not measured."
    if not _messages(measured, across=False):
        yield "One rank has no links: those of the profile are of the preset CPU."
    elif not _messages(measured, across=True):
        yield "Links between nodes were not measured: those of the profile are as fast as within this one."
    if measured.spread > UNSTEADY:
        yield f"Timings vary by {measured.spread:.0%}: other programs are running, so measure again when they are not."
    oversold = machine.threads * machine.per_node > machine.cores and machine.kind == "cpu"
    if oversold:
        yield f"{machine.per_node} ranks of {machine.threads} threads share {machine.cores} cores."


def _kind(measured: Measured) -> str:
    return "CPU" if measured.machine.kind == "cpu" else "GPU"


def _messages(measured: Measured, *, across: bool) -> list[Message]:
    return [one for one in measured.messages if one.across is across]


def _part(value: float) -> float:
    return min(max(value, LEAST_PART), 1.0)
