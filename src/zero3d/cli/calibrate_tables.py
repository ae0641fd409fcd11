"""What `zero3d calibrate` has measured, as tables for people."""

from collections.abc import Callable, Iterator, Mapping

from zero3d.calibrate.measured import Measured
from zero3d.cli.plain_table import PlainTable
from zero3d.cli.style import count, size
from zero3d.planner.hardware import Cluster


def tables(measured: Measured, cluster: Cluster) -> Iterator[PlainTable]:
    """Products, links where there are any, and the rest."""
    here, device = measured.machine, cluster.device
    title = f"{here.device}: one rank of {here.per_node}, all at once"
    products = PlainTable(title, ["what"], list(device.flops), drop=[])

    def row(what: str, found: Mapping[str, float], told: Callable[[float], str], style: str = "") -> None:
        products.add_row(what, *(told(found[dtype]) if dtype in found else "-" for dtype in device.flops), style=style)

    for m, n, k in dict.fromkeys((one.m, one.n, one.k) for one in measured.products):
        rates = {one.dtype: one.flops for one in measured.products if (one.m, one.n, one.k) == (m, n, k)}
        row(f"{m} x {n} x {k}", rates, _rate)
    row("large, fitted", device.flops, _rate, style="bold")
    row("fused attention", measured.attention, _rate)
    row("norms and activations", measured.moving, lambda rate: f"{size(rate)}/s")
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
