"""What each rank holds, sends and spends its time on, as rows of bars. Pure."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from zero3d.cli.style import size as bytes_text
from zero3d.pipeline.action import Kind
from zero3d.pipeline.picture import NAMES
from zero3d.report.contents import Run
from zero3d.report.figure import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    Bar,
    Figure,
    Rows,
    Table,
)
from zero3d.report.holdings import SIDES, WORDS, Held, holdings, kinds_of, on_device, rank_names
from zero3d.report.lines import by_rank, seconds_by
from zero3d.report.plan_file import AWAY
from zero3d.report.traced import Spent, is_wait, spent
from zero3d.report.units import duration

MOST_RANKS = 12
"""Rows of ranks in a figure, and MOST_ROWS in a table; what is left out is told."""
MOST_ROWS = 64
HOLDS = dict(
    zip(
        ("weights", "gradients", "optimizer", "activations", "buffers", *AWAY),
        (BLUE, ORANGE, GREEN, PURPLE, GREY, SKY, VERMILION, YELLOW),
        strict=True,
    )
)
SPENDS = {
    NAMES[Kind.FORWARD]: BLUE,
    NAMES[Kind.BACKWARD]: GREEN,
    NAMES[Kind.INPUT]: SKY,
    NAMES[Kind.WEIGHT]: ORANGE,
    "update": PURPLE,
    "other": GREY,
}
WAITS = {"wait for dp": VERMILION, "wait for tp": ORANGE, "wait for pp": YELLOW}


def bars(run: Run) -> list[Figure]:
    """Those of which something is known."""
    found = [memory(holdings(run)), time(spent(run.trace)) if run.trace else None, _offload(run), _sent(run)]
    return [one for one in found if one]


def memory(held: Sequence[Held]) -> Figure | None:
    """Model states before the run, rehearsed and measured bytes of each rank, stacked by kind."""
    kinds = kinds_of(held)
    if not kinds:
        return None
    rows, numbers = Rows(), list[list[str]]()
    for one in held[:MOST_RANKS]:
        for side in (side for side in SIDES if side in one.sides):
            table = one.sides[side]
            rows.add(
                f"{one.name}, {WORDS[side]}",
                [
                    Bar(
                        name=kind,
                        value=table.get(kind, 0),
                        text=f"{kind} {bytes_text(table.get(kind, 0))}",
                        colour=HOLDS.get(kind, GREY),
                        striped=kind in AWAY,
                    )
                    for kind in kinds
                ],
            )
    for one in held[:MOST_ROWS]:
        for side, table in one.sides.items():
            cells = [bytes_text(table[kind]) if kind in table else "not known" for kind in kinds]
            numbers.append([f"{one.name}, {WORDS[side]}", *cells, bytes_text(on_device(table))])
    sides = [side for side in SIDES if any(side in one.sides for one in held)]
    most = {side: max(on_device(one.sides[side]) for one in held if side in one.sides) for side in sides}
    told = "; ".join(
        f"{WORDS[side]}: {bytes_text(size)} on the device of the rank with most" for side, size in most.items()
    )
    note = {
        "planned": "Model states: what was known before the run; without activations and buffers.",
        "rehearsed": "Rehearsed: the peak of a step on fake tensors; host and staging together.",
        "measured": "Measured: after the last step, with the activations of one micro-batch.",
    }
    away = " Striped: not on the device." if any(kind in AWAY for kind in kinds) else ""
    return Figure(
        name="memory",
        title="Memory of each rank",
        told=f"{told[:1].upper()}{told[1:]}.",
        data=rows.data,
        layout=rows.layout("", tickformat="~s", ticksuffix="B"),
        table=Table(caption="Bytes held, by kind", heads=["ranks", *kinds, "on the device"], rows=numbers),
        note=" ".join(note[side] for side in sides) + away + _left_out(len(held), MOST_RANKS, "groups of ranks"),
        wide=True,
    )


def time(found: Sequence[Spent]) -> Figure:
    """Where each rank's step went, of traced steps."""
    names = list(dict.fromkeys(name for one in found for name in one.seconds))
    rows = Rows()
    for one in found[:MOST_RANKS]:
        rows.add(
            f"rank {one.rank}",
            [
                Bar(
                    name=name,
                    value=one.seconds.get(name, 0.0) * 1e3,
                    text=f"{name} {duration(one.seconds.get(name, 0.0))}, {one.share(name):.1%}",
                    colour=SPENDS.get(name) or WAITS.get(name, GREY),
                    striped=is_wait(name),
                )
                for name in names
            ],
        )
    cells = [
        [f"rank {one.rank}", *(duration(one.seconds.get(name, 0.0)) for name in names), duration(one.total)]
        for one in found[:MOST_ROWS]
    ]
    shares = {name: fmean(one.share(name) for one in found) for name in names}
    waits = sum(share for name, share in shares.items() if is_wait(name))
    listed = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    return Figure(
        name="time",
        title="Where the time of a step went",
        told=f"In the mean over ranks: {listed}. {waits:.0%} of a step is exposed waiting.",
        data=rows.data,
        layout=rows.layout("milliseconds of a traced step"),
        table=Table(caption="Time of a traced step, the mean", heads=["rank", *names, "in all"], rows=cells),
        note="The mean over traced steps. Striped: the rank stood still until a call on that axis was done; calls that "
        "ended before they were waited for cost nothing. Other: reading losses, clipping, and what is around actions."
        + _left_out(len(found), MOST_RANKS, "ranks"),
        wide=True,
    )


def _offload(run: Run) -> Figure | None:
    """A step of a run with offload, on rank 0: its own time, and beside it that of the queues."""
    steps = [one for one in run.metrics.steps if one.offload]
    split = seconds_by(run.metrics.done.get("offload")) if run.metrics.done else {}
    if not split and steps:
        timed = steps[1:] or steps
        split = {name: fmean(one.offload.get(name, 0.0) for one in timed) for name in steps[-1].offload}
    queues = [name for name in ("down", "update", "up") if name in split]
    if "compute" not in split or "hidden" not in split or not queues:
        return None
    worked = sum(split[name] for name in queues)
    exposed = max(worked - split["hidden"], 0.0)
    rows = Rows()
    rows.add("step", _milliseconds({"compute": split["compute"], "waiting for offload": exposed}))
    rows.add("queues", _milliseconds({name: split[name] for name in queues}))
    cells = [[name, duration(seconds)] for name, seconds in {**split, "waiting for offload": exposed}.items()]
    return Figure(
        name="offload",
        title="Offload in a step",
        told=f"Of {duration(worked)} that the queues worked, {duration(split['hidden'])} were hidden beside other work "
        f"and {duration(exposed)} added to the step.",
        data=rows.data,
        layout=rows.layout("milliseconds"),
        table=Table(caption="A step on rank 0, the mean", heads=["part", "time"], rows=cells),
        note="Down: gradients to the host. Update: of master weights there. Up: weights to the device.",
    )


def _milliseconds(seconds: Mapping[str, float]) -> list[Bar]:
    colours = {"compute": BLUE, "waiting for offload": VERMILION, "down": ORANGE, "update": PURPLE, "up": GREEN}
    return [
        Bar(
            name=name,
            value=one * 1e3,
            text=f"{name} {duration(one)}",
            colour=colours[name],
            striped=name.startswith("waiting"),
        )
        for name, one in seconds.items()
    ]


def _sent(run: Run) -> Figure | None:
    """Bytes that leave each rank in a step, by axis."""
    sent = by_rank(run.metrics.done.get("sent_bytes")) if run.metrics.done else {}
    if not any(any(numbers) for numbers in sent.values()):
        return None
    world = min(map(len, sent.values()))
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        alike.setdefault(tuple(numbers[rank] for numbers in sent.values()), []).append(rank)
    rows, cells = Rows(), list[list[str]]()
    for sizes, ranks in alike.items():
        if len(rows.names) < MOST_RANKS:
            named = zip(sent, sizes, COLOURS, strict=False)
            rows.add(
                rank_names(ranks),
                [
                    Bar(name=f"over {axis}", value=size, text=f"{bytes_text(size)} over {axis}", colour=colour)
                    for axis, size, colour in named
                ],
            )
        cells.append([rank_names(ranks), *map(bytes_text, sizes), bytes_text(sum(sizes))])
    most = max(sum(sizes) for sizes in alike)
    over = ", ".join(f"{bytes_text(max(numbers))} over {axis}" for axis, numbers in sent.items())
    return Figure(
        name="sent",
        title="Bytes sent in a step",
        told=f"The rank that sends most sends {bytes_text(most)} in a step; by axis at most {over}.",
        data=rows.data,
        layout=rows.layout("", tickformat="~s", ticksuffix="B"),
        table=Table(caption="Bytes sent in a step", heads=["ranks", *sent, "in all"], rows=cells[:MOST_ROWS]),
        note="The mean over all steps." + _left_out(len(alike), MOST_RANKS, "groups of ranks"),
    )


def _left_out(count: int, most: int, what: str) -> str:
    return f" The first {most} of {count:,} {what} are drawn." if count > most else ""
