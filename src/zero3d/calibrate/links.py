"""How fast ranks reach each other: by what they do, how many do it together, and how much moves."""

from collections.abc import Callable, Iterator
from datetime import timedelta

import torch

from zero3d.calibrate.bench import Bench
from zero3d.calibrate.measured import Effort, Message, Verb
from zero3d.comm.mesh import open_mesh
from zero3d.contracts import Axis
from zero3d.layout import Layout

ITEM = 4
"""Bytes: fp32 travels."""


def group_sizes(per_node: int) -> list[int]:
    """Sizes of groups within a node, each a divisor: doubled from 2 on, and the whole node.

    >>> group_sizes(8), group_sizes(6), group_sizes(1)
    ([2, 4, 8], [2, 6], [])
    """
    doubled = [1 << power for power in range(1, per_node.bit_length()) if per_node % (1 << power) == 0]
    return [*doubled, *([per_node] if per_node > 1 and per_node not in doubled else [])]


def groups(world: int, per_node: int, timeout: timedelta) -> Iterator[tuple[Axis, bool]]:
    """(axis, across nodes) of each size; all groups of the world at a time. Collective."""
    for size in group_sizes(per_node):
        yield open_mesh(Layout(dp=world // size, tp=size), timeout).axes["tp"], False
    if world > per_node:
        yield open_mesh(Layout(dp=world // per_node, tp=per_node), timeout).axes["dp"], True


def messages(bench: Bench, effort: Effort, axis: Axis, *, across: bool) -> Iterator[Message]:
    """All verbs and sizes on one axis. Pairs tell how fast one rank reaches another; larger groups are for what is
    gathered and reduced."""
    verbs: tuple[Verb, ...] = ("send", "all-gather", "reduce-scatter") if axis.size == 2 else VERBS
    for verb in verbs:
        for size in effort.messages:
            sent, work = _call(axis, verb, size, bench.device)
            yield Message(verb=verb, ranks=axis.size, sent=sent, seconds=bench.seconds(work), across=across)


VERBS: tuple[Verb, ...] = ("all-gather", "reduce-scatter")


def _call(axis: Axis, verb: Verb, size: int, device: torch.device) -> tuple[int, Callable[[], None]]:
    """(bytes that leave a rank, the call) for a buffer of about `size` bytes."""
    each = max(size // (ITEM * axis.size), 1)
    whole, part = (torch.zeros(numel, device=device) for numel in (each * axis.size, each))
    if verb == "all-gather":
        return ITEM * each * (axis.size - 1), lambda: axis.all_gather(whole, part, "calibration").wait()
    if verb == "reduce-scatter":
        return ITEM * each * (axis.size - 1), lambda: axis.reduce_scatter(part, whole, "calibration").wait()
    first = axis.index == 0
    move = axis.send if first else axis.recv
    # One way only: a rank that sends is done when the other has it.
    return ITEM * whole.numel(), lambda: move(whole, 1 - axis.index, "calibration").wait()
