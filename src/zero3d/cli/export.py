"""`zero3d export CHECKPOINT OUT`: the weights of a checkpoint as files for other programs. Starts no ranks, builds no
model."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from zero3d.checkpoint.place import Url, place
from zero3d.checkpoint.target import check_free
from zero3d.cli import found
from zero3d.cli.options import AsJson
from zero3d.cli.progress import Bytes
from zero3d.cli.reporting import reporting_errors
from zero3d.cli.style import count, size
from zero3d.errors import UsageError

if TYPE_CHECKING:
    from zero3d.checkpoint.export import Exported
    from zero3d.checkpoint.folders import Found

FORMATS: Final = ("safetensors", "torch")
DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def command(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a URL of one; of a run the newest.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A folder, new or empty.")],
    form: Annotated[
        str, typer.Option("--format", help="safetensors, or torch: one pickle file for torch.load.")
    ] = "safetensors",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="fp32, bf16 or fp16; left out, what the checkpoint has.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Of each safetensors file.")
    ] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Write the weights of a checkpoint as safetensors, which Transformers loads."""

    def work() -> None:
        if form not in FORMATS:
            raise UsageError(f"--format {form}", hint=f"It is one of {', '.join(FORMATS)}.")
        if dtype is not None and dtype not in DTYPES:
            raise UsageError(f"--dtype {dtype}", hint=f"It is one of {', '.join(DTYPES)}.")
        shard_bytes = bytes_of(max_shard_size)
        folder = place(out)
        if isinstance(folder, Url):
            raise UsageError("what is exported goes to a folder of this machine", where=out, hint="Copy it from there.")
        taken = found.find(checkpoint)
        check_free(folder)
        for skipped in taken.skipped:
            print(f"zero3d: not used: {skipped}", file=sys.stderr)
        done = _export(taken, folder, form, dtype, shard_bytes)
        _tell(taken, done, as_json=as_json)

    raise typer.Exit(reporting_errors(work, as_json=as_json))


def bytes_of(text: str) -> int:
    """Of a size such as "5GB" (10 to the 9) or "2GiB" (2 to the 30). Raises `UsageError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", text.strip().upper())
    found_bytes = int(float(match[1]) * UNITS.get(match[2], 0)) if match else 0
    if not found_bytes:
        raise UsageError(f"--max-shard-size {text}", hint="Write a number and a unit, such as 5GB or 500MB.")
    return found_bytes


def _export(taken: "Found", out: Path, form: str, dtype: str | None, shard_bytes: int) -> "Exported":
    # Here, not above: what is wrong with the input is told before torch is loaded.
    import torch

    from zero3d.checkpoint.export import Style, export_checkpoint

    chosen = None if dtype is None else getattr(torch, DTYPES[dtype])
    style = Style(form="torch" if form == "torch" else "safetensors", dtype=chosen, shard_bytes=shard_bytes)
    with Bytes("exporting") as progress:
        return export_checkpoint(taken, out, style, progress)


def _tell(taken: "Found", done: "Exported", *, as_json: bool) -> None:
    partly = taken.manifest.what == "trainable"
    if as_json:
        event = {
            "event": "done",
            "checkpoint": str(taken.path),
            "step": taken.manifest.step,
            "what": taken.manifest.what,
            "out": str(done.folder),
            "files": [one.name for one in done.files],
            "tensors": len(done.weights),
            "parameters": sum(one.numel for one in done.weights),
            "bytes": done.nbytes,
            "skipped": list(taken.skipped),
        }
        print(json.dumps(event))
        return
    numel = sum(one.numel for one in done.weights)
    dtypes = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in done.weights}))
    print(
        f"{taken.path.name}: {len(done.weights)} tensors, {count(numel)} elements, {dtypes}, {size(done.nbytes)}\n"
        f"written to {done.folder}: {', '.join(one.name for one in done.files)}"
    )
    if partly:
        print("The checkpoint has the trainable weights alone: the frozen ones are not among them.")
