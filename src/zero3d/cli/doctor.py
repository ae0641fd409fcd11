"""`zero3d doctor`: what this machine has, what of zero3d works on it and what to do about the rest.

Ends with a check that starts two ranks, as `train` does, and adds a tensor over them. Under torchrun it is one of the
ranks: the same check over all of them, whatever machines they are on.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zero3d.cli.diagnosis import Finding, abilities, findings
from zero3d.cli.health import Facts, look
from zero3d.cli.options import AsJson, Debug
from zero3d.cli.rank import PARENT, run_as_rank, started_as
from zero3d.cli.reporting import reporting_errors
from zero3d.errors import UsageError, Zero3dError

FILE_WIDTH: Final = 120
"""Columns where the output is no terminal."""
RANKS: Final = 2
ELEMENTS: Final = 1 << 18
"""Of the tensor that is added: 1 MB of fp32."""
TIMEOUT_SECONDS: Final = 30
MARKS: Final = {"good": ("ok", "green"), "note": ("--", "yellow"), "bad": ("!!", "red bold")}
CHECK: Final = "two ranks"


def command(
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Start two ranks and add a tensor over them.")
    ] = True,
    on_cpu: Annotated[
        bool, typer.Option("--on-cpu", hidden=True, help="A rank of the check that leaves GPUs.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tell what this machine has, what works on it and what to do; try two ranks."""
    environment = dict(os.environ)
    if started_as(environment) is not None:
        if on_cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Before torch is loaded, which reads it once.
        code = run_as_rank(lambda: _on_rank(environment, as_json=as_json), environment, debug=debug, as_json=as_json)
        raise typer.Exit(code)
    code = 0

    def work() -> None:
        nonlocal code
        facts = look(environment)
        found, able = findings(facts), abilities(facts)
        if check:
            found.append(_tried(facts, environment, debug=debug))
        code = exit_code(found)
        if as_json:
            print(json.dumps(as_event(facts, found, able)))
        else:
            _show(found, able)

    raise typer.Exit(reporting_errors(work, as_json=as_json) or code)


def exit_code(found: list[Finding]) -> int:
    """4: ranks cannot work together; 2: something else makes training impossible; else 0."""
    bad = [one.name for one in found if one.verdict == "bad"]
    return (4 if bad == [CHECK] else 2) if bad else 0


def as_event(facts: Facts, found: list[Finding], able: list[Finding]) -> dict[str, object]:
    """What programs read."""
    return {
        "event": "done",
        "possible": not exit_code(found),
        "facts": asdict(facts),
        "findings": [asdict(one) for one in found],
        "abilities": [asdict(one) for one in able],
    }


def _tried(facts: Facts, environment: Mapping[str, str], *, debug: bool) -> Finding:
    """Two ranks over loopback; on GPUs where there are two."""
    if facts.torch_error or "gloo" not in facts.back_ends:
        return Finding(name=CHECK, value="not tried without torch and gloo", verdict="note", todo="See above.")
    from zero3d.cli.launch import run_ranks

    on_gpus = len(facts.gpus) >= RANKS
    began = time.monotonic()
    with _waiting(f"starting {RANKS} ranks"):
        flags = [*([] if on_gpus else ["--on-cpu"]), *(["--debug"] if debug else [])]
        try:
            failed: Zero3dError | None = run_ranks(["doctor", *flags], RANKS, environment, debug=debug)
        except OSError as error:
            failed = UsageError(f"ranks cannot be started: {error}", hint="Ranks meet on 127.0.0.1: allow that.")
    took = time.monotonic() - began
    if failed is not None:
        hint = failed.hint or "Run zero3d doctor --debug to see all that ranks print."
        return Finding(name=CHECK, value=failed.message, verdict="bad", todo=hint)
    where = "GPUs, over nccl" if on_gpus else "CPU, over gloo"
    return Finding(name=CHECK, value=f"met and added a tensor on the {where}, in {took:.1f} s")


def _on_rank(environment: Mapping[str, str], *, as_json: bool) -> None:
    """In each rank: adds a tensor over all of them. Raises `Zero3dError` where the sum is wrong."""
    from datetime import timedelta

    import torch

    from zero3d.comm.mesh import open_mesh, ranks_started
    from zero3d.layout import Layout

    world = ranks_started()
    mesh = open_mesh(Layout(dp=world), timedelta(seconds=TIMEOUT_SECONDS))
    began = time.monotonic()
    numbers = torch.full((ELEMENTS,), float(mesh.rank + 1), device=mesh.device)
    mesh.everyone.all_reduce(numbers, "the tensor of zero3d doctor").wait()
    wanted = world * (world + 1) / 2
    if not bool((numbers == wanted).all()):
        raise Zero3dError(
            f"the sum over {world} ranks is {float(numbers[0])}, not {wanted}",
            hint="Memory or network of this machine is broken, or torch is; try another torch.",
        )
    if PARENT in environment or mesh.rank:
        return
    took, hosts = time.monotonic() - began, sorted(set(mesh.hosts))
    if as_json:
        told = {"event": "done", "possible": True, "ranks": world, "hosts": hosts, "seconds": took}
        print(json.dumps(told), flush=True)
    else:
        print(f"{world} ranks on {', '.join(hosts)} met and added a tensor, in {took:.2f} s", flush=True)


@contextmanager
def _waiting(what: str) -> "Iterator[None]":
    """On stderr while ranks start: a spinner on a terminal, else one line."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"{what} ..."):
            yield
    else:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield


def _show(found: list[Finding], able: list[Finding]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for title, rows in (("This machine", found), ("What works", able)):
        if not rows:
            continue
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
        )
        for _ in range(3):
            table.add_column(overflow="fold")
        for one in rows:
            mark, style = MARKS[one.verdict]
            value = Text(one.value)
            if one.todo:
                value.append(f"  {one.todo}", style)
            table.add_row(Text(mark, style), Text(one.name), value)
        console.print(table, "")
    bad = [one.name for one in found if one.verdict == "bad"]
    console.print(
        Text(f"Training is not possible here yet: {', '.join(bad)}." if bad else "Training is possible here."),
        style="bold",
    )
