"""What `zero3d calibrate` has measured, as tables for people."""

from collections.abc import Iterator

from zero3d.calibrate.measured import Measured
from zero3d.cli.plain_table import PlainTable
from zero3d.cli.style import count, size
from zero3d.planner.hardware import Cluster


def tables(measured: Measured, cluster: Cluster) -> Iterator[PlainTable]:
    """Products, links where there are any, and the rest."""
    here, device = measured.machine, cluster.device
    products = PlainTable(
        f"{here.device}: FLOP/s of one rank of {here.per_node}, all at once", ["m, n, k"], list(device.flops), drop=[]
    )
    for sizes in dict.fromkeys((one.m, one.n, one.k) for one in measured.products):
        rates = {one.dtype: one.flops for one in measured.products if (one.m, one.n, one.k) == sizes}
        products.add_row(
            " x ".join(map(str, sizes)), *(_rate(rates[dtype]) if dtype in rates else "-" for dtype in device.flops)
        )
    products.add_row("large, fitted", *(_rate(peak) for peak in device.flops.values()), style="bold")
    yield products
    sizes_sent = PlainTable(
        "Links: time of a call, and bytes a rank sends",
        ["call", "ranks"],
        ["sent", "time", "rate"],
        drop=[],
    )
    for one in measured.messages:
        name = f"{one.verb}, across nodes" if one.across else one.verb
        sizes_sent.add_row(
            name,
            str(one.ranks),
            size(one.sent),
            f"{one.seconds * 1e3:#.3g} ms".replace(". ", " "),
            f"{size(one.sent / one.seconds)}/s",
        )
    if measured.messages:
        yield sizes_sent
    rest = PlainTable("Memory and host", ["what"], ["measured"], drop=[])
    for what, value in (
        ("memory, one rank", f"{size(measured.stream)}/s"),
        ("norms and activations, one rank", f"{size(measured.moving)}/s"),
        ("fused attention, one rank", _rate(measured.attention)),
        ("smallest operation", f"{measured.launch * 1e6:.1f} us"),
        ("latency between ranks", f"{cluster.inside.latency * 1e6:.0f} us"),
        ("waits for the slowest rank", f"{measured.skew:.0%} of computing"),
        ("AdamW on the host, all ranks", f"{count(measured.update)} parameters/s"),
        ("copies to the host, one rank", f"{size(measured.copy)}/s"),
    ):
        rest.add_row(what, value)
    yield rest


def _rate(flops: float) -> str:
    """Such as `66.1 GFLOP/s`."""
    for unit, scale in (("T", 1e12), ("G", 1e9)):
        if flops >= scale:
            return f"{flops / scale:#.3g}".rstrip(".") + f" {unit}FLOP/s"
    return f"{flops / 1e6:#.3g}".rstrip(".") + " MFLOP/s"
