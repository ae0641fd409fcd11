"""From measured curves to a profile: numbers that were put in come out, and the planner takes the file."""

from dataclasses import replace
from pathlib import Path

import pytest

from zero3d.calibrate import fit
from zero3d.calibrate.measured import Machine, Measured, Message, Product
from zero3d.calibrate.profile import cluster_of, notes
from zero3d.errors import UsageError
from zero3d.planner import hardware, network

MACHINE = Machine(
    device="CPU, 1 thread a rank",
    kind="cpu",
    world=4,
    per_node=4,
    threads=1,
    cores=4,
    memory=4e9,
    host_memory=16e9,
)


def products(peaks: dict[str, float], half: float) -> tuple[Product, ...]:
    sizes = [(dim, dim, dim) for dim in (64, 128, 256, 512, 1024)] + [(16, 1024, 1024)]
    return tuple(
        Product(dtype=dtype, m=m, n=n, k=k, flops=peak / ((1 + half / m) * (1 + half / n) * (1 + half / k)))
        for dtype, peak in peaks.items()
        for m, n, k in sizes
    )


def messages(latency: float, bandwidth: float, *, verb: str, ranks: int, across: bool = False) -> list[Message]:
    return [
        Message(verb=verb, ranks=ranks, sent=sent, seconds=latency + sent / bandwidth, across=across)  # type: ignore[arg-type]
        for sent in (0, 10**4, 10**6, 10**7)
    ]


MEASURED = Measured(
    machine=MACHINE,
    products=products({"fp32": 60e9, "bf16": 9e9, "fp16": 50e9}, 20),
    attention={"fp32": 24e9, "bf16": 3e9, "fp16": 10e9},
    moving={"fp32": 6e9, "bf16": 2e9, "fp16": 3e9},
    stream=10e9,
    launch=2e-6,
    messages=(
        *messages(5e-5, 2e9, verb="send", ranks=2),
        *messages(6e-5, 1.8e9, verb="all-gather", ranks=2),
        *messages(9e-5, 1e9, verb="all-gather", ranks=4),
        *messages(9e-5, 1e9, verb="reduce-scatter", ranks=4),
    ),
    update=3e8,
    copy=4e9,
    skew=0.1,
    spread=0.05,
)


@pytest.mark.parametrize("half", [0, 8, 60, 300])
def test_products_that_follow_the_formula_give_its_numbers(half: float) -> None:
    """`half` is tried in steps of a tenth; each dtype has its own."""
    rates = fit.products([*products({"fp32": 60e9}, half), *products({"bf16": 9e9}, 2 * half)])
    assert {dtype: one.half for dtype, one in rates.items()} == pytest.approx(
        {"fp32": half, "bf16": 2 * half}, rel=0.06
    )
    assert {dtype: one.peak for dtype, one in rates.items()} == pytest.approx({"fp32": 60e9, "bf16": 9e9}, rel=0.06)
    assert all(one.error < 0.15 for one in rates.values())


def test_a_few_products_are_enough() -> None:
    """A machine on which the second size of a dtype would take too long has measured one."""
    rates = fit.products([Product(dtype="fp32", m=64, n=64, k=64, flops=5e9)])
    assert rates["fp32"].peak > 4.99e9


def test_a_line_needs_a_message_and_survives_noise() -> None:
    assert fit.line([]) is None
    same = fit.line([Message(verb="send", ranks=2, sent=sent, seconds=1e-3) for sent in (1000, 2000)])
    assert same is not None and same.bandwidth == pytest.approx(2e6), "no slope: the largest message's rate"


def test_a_profile_has_what_was_measured() -> None:
    cluster = cluster_of(MEASURED)
    device, host = cluster.device, cluster.host
    assert device.flops == pytest.approx({"fp32": 60e9, "bf16": 9e9, "fp16": 50e9}, rel=0.06)
    assert (device.memory, device.bandwidth, device.launch) == (4e9, 10e9, 2e-6)
    assert (device.rates.matrix, device.rates.moving, device.rates.skew) == (1.0, 0.6, 0.1)
    assert device.rates.streaming == pytest.approx(3e8 * 28 / 4 / 10e9) and device.streamed(2.1e9) == pytest.approx(1)
    assert device.rates.hidden == 0.001, "no core is left to send while all compute"
    spare = cluster_of(replace(MEASURED, machine=replace(MACHINE, cores=8)))
    assert spare.device.rates.hidden == hardware.PRESETS["CPU"].device.rates.hidden
    assert device.rates.attention == pytest.approx(0.4, rel=0.06)
    bf16 = device.rates.of("bf16")
    assert (bf16.attention, bf16.moving, bf16.half) == pytest.approx((3 / 9, 0.2, 20), rel=0.06)
    assert device.moved(2e9, "bf16") == pytest.approx(1) and device.moved(6e9) == pytest.approx(1)
    assert device.rates.of("fp8").attention == device.rates.attention, "what nobody measured is as fp32"
    assert (cluster.inside.latency, cluster.inside.bandwidth) == pytest.approx((3e-5, 2e9)), "a ring of 4 has 3 steps"
    assert device.rates.link == pytest.approx(0.5), "what groups of four reach of it"
    assert (device.rates.pair, device.rates.hop) == pytest.approx((1.0, 5e-5))
    assert cluster.spread == 0.05
    assert (host.memory, host.cores, host.update, host.copy_rate) == (16e9, 4, 3e8, 4e9)
    assert cluster.across == cluster.inside


def test_links_between_nodes_are_their_own() -> None:
    slow = messages(1e-4, 1e8, verb="all-gather", ranks=2, across=True)
    two_nodes = replace(MEASURED, machine=replace(MACHINE, world=8), messages=(*MEASURED.messages, *slow))
    cluster = cluster_of(two_nodes)
    reached = cluster.across.bandwidth * cluster.device.rates.link
    assert (cluster.across.latency, reached) == pytest.approx((1e-4, 1e8))
    assert cluster.inside == cluster_of(MEASURED).inside
    assert not [note for note in notes(two_nodes) if "between nodes" in note]


@pytest.mark.parametrize("num_bytes", [0, 10**5, 10**7])
def test_the_planner_predicts_what_was_measured(num_bytes: int) -> None:
    """Its formulas, with the profile's numbers, give back the lines that went in; to the planner no message is faster
    than a collective, in which ranks send and receive at once."""
    cluster = cluster_of(MEASURED)
    gathered = network.collective(cluster, network.Group(4), "all_gather", num_bytes * 4 / 3)
    assert gathered == pytest.approx(9e-5 + num_bytes / 1e9)
    assert network.message(cluster, 1, num_bytes) == pytest.approx(5e-5 + num_bytes / 1e9)


def test_the_planner_takes_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(cluster_of(MEASURED).to_json())
    assert hardware.find(str(file)) == cluster_of(MEASURED)
    file.write_text("{}")
    with pytest.raises(UsageError):
        hardware.find(str(file))


def test_what_is_odd_is_said() -> None:
    told = " ".join(notes(MEASURED))
    assert "bf16 7 times" in told and "fp16" not in told, "50 of 60 GFLOP/s is not slow"
    assert 'precision.compute = "fp32" is the fastest' in told
    mixed = replace(MEASURED, products=products({"fp32": 60e9, "bf16": 480e9, "fp16": 20e9}, 20))
    told_of_it = " ".join(notes(mixed))
    assert "fp16 3 times" in told_of_it and 'precision.compute = "bf16" is the fastest' in told_of_it
    assert "between nodes were not measured" in told and "vary" not in told
    even = replace(MEASURED, products=products({"fp32": 60e9, "bf16": 120e9}, 20), spread=0.4)
    told = " ".join(notes(even))
    assert "slower" not in told and "vary by 40%" in told and "fp16 were not measured" in told
    alone = replace(MEASURED, messages=(), machine=replace(MACHINE, world=1, per_node=1, threads=4))
    told = " ".join(notes(alone))
    assert "no links" in told and "share" not in told
    assert cluster_of(alone).inside == hardware.PRESETS["CPU"].inside
    assert "share 4 cores" in " ".join(notes(replace(MEASURED, machine=replace(MACHINE, threads=2))))
