"""`zero3d show checkpoint PATH`: what is in a checkpoint, and whether it is whole. Needs no ranks and no model; loads
torch only to read checksums."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero3d.checkpoint.manifest import ITEMSIZE, Entry, Manifest, Number
from zero3d.checkpoint.place import Url
from zero3d.cli import found
from zero3d.cli.options import AsJson
from zero3d.cli.progress import Bytes
from zero3d.cli.reporting import reporting_errors
from zero3d.cli.style import count, size
from zero3d.errors import DataError

if TYPE_CHECKING:
    from rich.console import RenderableType

FILE_WIDTH = 120
"""Columns where the output is no terminal."""
DAMAGED = "Take another checkpoint: those beside it may be whole, and --resume falls back to one that is."
DTYPES = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}


def command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a URL of one; of a run the newest.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and compare their checksums.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is in a checkpoint: step, layout, tensors, and whether it is whole.

    Leaves with 2 where it is not whole.
    """
    code = 0

    def work() -> None:
        nonlocal code
        place, manifest, problems = found.look(path)
        why = "" if manifest else problems[0]
        if manifest and verify:
            why = _verified(place, manifest)
        if as_json:
            print(json.dumps(as_event(place, manifest, why, problems, verified=verify)))
        else:
            _show(place, manifest, why, problems, verified=verify)
        if why:
            print(f"zero3d: the checkpoint is not whole: {why}\n{DAMAGED}", file=sys.stderr)
            code = DataError.exit_code

    raise typer.Exit(reporting_errors(work, as_json=as_json) or code)


def as_event(
    place: Path | Url, manifest: Manifest | None, why: str, problems: tuple[str, ...], *, verified: bool
) -> dict[str, object]:
    """What programs read. why: what is wrong where `whole` is false; verified: whether checksums were compared."""
    event: dict[str, object] = {
        "checkpoint": str(place),
        "step": manifest.step if manifest else found.step_of(place),
        "whole": not why,
        "why": why,
        "verified": verified,
        "skipped": list(problems) if manifest else list(problems[1:]),
    }
    if manifest is None:
        return {**event, "tensors": {}}
    return {
        **event,
        "what": manifest.what,
        "layout": manifest.layout.model_dump(),
        "learning_rate": manifest.learning_rate,
        "bytes": sum(one.size for one in manifest.files),
        "files": {one.name: one.size for one in manifest.files},
        "tensors": dict(_tensors(manifest)),
    }


def _tensors(manifest: Manifest) -> Iterator[tuple[str, dict[str, object]]]:
    states: dict[str, list[Entry]] = {}
    for one in manifest.tensors:
        if one.kind == "state":
            states.setdefault(one.name, []).append(one)
    for one in manifest.tensors:
        if one.kind != "state":
            yield one.name, _tensor(one, states.get(one.name, []), manifest.numbers.get(one.name, {}))


def _tensor(entry: Entry, states: Sequence[Entry], numbers: Mapping[str, Number]) -> dict[str, object]:
    """optimizer: shape and dtype of each state, or its value where that is a number."""
    return {
        "kind": entry.kind,
        "shape": entry.shape,
        "dtype": dtype_name(entry.dtype),
        "trainable": entry.trainable,
        "ties": entry.ties,
        "optimizer": {one.key: {"shape": one.shape, "dtype": dtype_name(one.dtype)} for one in states}
        | {key: one.value for key, one in numbers.items()},
    }


def dtype_name(name: str) -> str:
    """torch's name for safetensors' one.

    >>> dtype_name("BF16"), dtype_name("U8"), dtype_name("F8_E4M3")
    ('bfloat16', 'uint8', 'float8_e4m3')
    """
    kind = name.rstrip("0123456789") if "_" not in name else "F"
    return DTYPES[kind] + name.removeprefix(kind).lower() if kind in DTYPES else name.lower()


def _verified(place: Path | Url, manifest: Manifest) -> str:
    """What is wrong; empty if nothing."""
    from zero3d.checkpoint.rebuild import Rebuilder

    try:
        with Bytes("reading") as progress, Rebuilder(place, manifest) as rebuilder:
            rebuilder.verify(progress)
    except DataError as error:
        return f"{error.message} ({error.where})"
    return ""


def _show(place: Path | Url, manifest: Manifest | None, why: str, problems: tuple[str, ...], *, verified: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for problem in problems if manifest else problems[1:]:
        console.print(Text(f"not whole: {problem}", style="yellow"), soft_wrap=True)
    checked = "checksums compared" if verified else "by sizes; --verify compares checksums"
    told = Text(f"{place}: not whole", style="bold red") if why else Text(f"{place}: whole ({checked})", style="bold")
    console.print(told, soft_wrap=True)
    if manifest is None:
        return
    for line in _facts(manifest):
        console.print(Text(line), soft_wrap=True)
    console.print()
    console.print(_table(manifest), highlight=False, markup=False)


def _facts(manifest: Manifest) -> list[str]:
    sizes, files = manifest.layout, manifest.files
    kept = {"all": "weights and optimizer state", "weights": "weights alone", "trainable": "what is trainable alone"}
    weights = [one for one in manifest.tensors if one.kind == "weight"]
    lines = [
        f"step {manifest.step:,}, {kept[manifest.what]}, learning rate {manifest.learning_rate:.3g}",
        f"saved by dp {sizes.dp} x tp {sizes.tp} x pp {sizes.pp}: {len(files)} file{'s' * (len(files) != 1)}, "
        f"{size(sum(one.size for one in files))}",
        f"{count(sum(one.numel for one in weights))} parameters, "
        f"{count(sum(one.numel for one in weights if one.trainable))} of them trainable",
    ]
    if manifest.scaler.enabled:
        lines.append(f"loss scale {manifest.scaler.scale:g}")
    return lines


def _table(manifest: Manifest) -> "RenderableType":
    from zero3d.cli.plain_table import PlainTable

    keys: dict[str, list[str]] = {}
    held: dict[str, int] = {}
    for one in manifest.tensors:
        held[one.name] = held.get(one.name, 0) + one.numel * ITEMSIZE[one.dtype]
        if one.kind == "state":
            keys.setdefault(one.name, []).append(one.key)
    table = PlainTable(
        "Tensors", ["name", "shape", "dtype"], ["size"], ["", "optimizer", "ties"], drop=["optimizer", "size", ""]
    )
    for one in manifest.tensors:
        if one.kind == "state":
            continue
        note = "buffer" if one.kind == "buffer" else "" if one.trainable else "frozen"
        states = ", ".join([*keys.get(one.name, ()), *manifest.numbers.get(one.name, ())])
        shape = " x ".join(map(str, one.shape)) or "scalar"
        table.add_row(one.name, shape, dtype_name(one.dtype), size(held[one.name]), note, states, ", ".join(one.ties))
    return table
