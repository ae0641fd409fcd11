"""`zero3d report RUN`: one page of HTML from what a run has left in its folder. Starts no ranks and loads no torch."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from zero3d.cli.options import AsJson
from zero3d.cli.out_file import check_out, write_out
from zero3d.cli.reporting import reporting_errors
from zero3d.cli.style import size
from zero3d.errors import UsageError

PAGE = "report.html"
EXTRA = "zero3d[report]"


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/demo.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help=f"Where the page goes; left out, RUN/{PAGE}.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one page of a run: loss, speed, memory, time, layout, configuration. It needs no network."""

    def work() -> None:
        _work(run, out, as_json=as_json)

    raise typer.Exit(reporting_errors(work, as_json=as_json))


def _work(path: Path, out: Path | None, *, as_json: bool) -> None:
    from zero3d.report import contents, places
    from zero3d.report.facts import facts
    from zero3d.report.page import page
    from zero3d.report.sections import head_and_sections

    folder = places.find(path)
    if importlib.util.find_spec("plotly") is None:
        raise UsageError("the figures are drawn with plotly, which is not installed", hint=f"pip install {EXTRA}")
    file = folder / PAGE if out is None else out
    check_out(file)
    run = contents.read(folder)
    head, sections = head_and_sections(run)
    text = page(head, sections, _plotly())
    write_out(file, text)
    if as_json:
        print(json.dumps({"page": str(file), **facts(run, list(head.notices))}))
        return
    for notice in head.notices:
        print(notice, file=sys.stderr)
    print(f"{file}: {size(len(text.encode()))}, {head.state}")


def _plotly() -> str:
    """Its JavaScript."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped, unused-ignore]

    return str(get_plotlyjs())
