"""All measurements, in order. Every rank calls `measure`."""

from collections.abc import Iterator
from datetime import timedelta
from statistics import median

import torch

from zero3d.calibrate import compute, host, links
from zero3d.calibrate.bench import Bench
from zero3d.calibrate.measured import Effort, Machine, Measured, Message, Product, Progress
from zero3d.comm.mesh import open_mesh, ranks_started
from zero3d.layout import Layout

TIMEOUT = timedelta(seconds=120)
LONG = 16
"""Times as many tokens has a GPU's sequence."""


def measure(effort: Effort, machine: Machine, progress: Progress) -> Measured:
    """What the ranks of `machine` do, all at the same time. Collective; the same on every rank.

    The device in `machine` is that of rank 0, as nodes are taken to be alike.
    """
    world = ranks_started()
    mesh = open_mesh(Layout(dp=world), TIMEOUT)
    axes = list(links.groups(world, machine.per_node, TIMEOUT))
    of_dtypes = (len(effort.dims) + len(effort.skinny) + 2) * len(effort.dtypes)
    of_links = len(effort.messages) * (2 * len(axes) + 1) if axes else 0
    total = of_dtypes + of_links + 6
    bench = Bench(mesh.everyone, mesh.device, effort.seconds / total)
    done = 0

    def next_is(what: str) -> None:
        nonlocal done
        progress(what, done / total)
        done += 1

    def products() -> Iterator[Product]:
        for dtype in effort.dtypes:
            for one in compute.products(bench, effort, dtype):
                next_is(f"{dtype} products")
                yield one

    def messages() -> Iterator[Message]:
        for axis, across in axes:
            for one in links.messages(bench, effort, axis, across=across):
                next_is(f"{one.verb} of {one.ranks} ranks")
                yield one

    found_products = tuple(products())
    given, tokens = (effort.given, effort.tokens) if machine.kind == "cpu" else (effort.elements, LONG * effort.tokens)
    attention, moving = {}, {}
    for dtype in effort.dtypes:
        next_is(f"{dtype} attention")
        attention[dtype] = compute.attention(bench, dtype, tokens)
        next_is(f"{dtype} norms and activations")
        moving[dtype] = compute.moving(bench, dtype, given, effort.held)
    next_is("memory")
    stream = compute.stream(bench, effort.elements)
    next_is("the smallest operation")
    launch = compute.launch(bench)
    found_messages = tuple(messages())
    next_is("waits for the slowest rank")
    skew = compute.skew(bench, effort)
    next_is("the update on the host")
    update = host.update(bench, effort.elements) * machine.per_node
    next_is("copies to the host")
    return Measured(
        machine=machine,
        products=found_products,
        attention=attention,
        moving=moving,
        stream=stream,
        launch=launch,
        messages=found_messages,
        update=update,
        copy=host.copy(bench, effort.elements),
        skew=skew,
        spread=bench.slowest(median(bench.spreads)),
    )


def this_machine(*, per_node: int, cores: int, host_memory: float) -> Machine:
    """What this rank finds; cores, host_memory (bytes): of the node."""
    cuda = torch.cuda.is_available()
    memory = float(torch.cuda.get_device_properties(0).total_memory) if cuda else host_memory / per_node
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(0) if cuda else f"CPU, {threads} thread{'s' * (threads > 1)} a rank"
    return Machine(
        device=name,
        kind="cuda" if cuda else "cpu",
        world=ranks_started(),
        per_node=per_node,
        threads=threads,
        cores=cores,
        memory=memory,
        host_memory=host_memory,
    )
