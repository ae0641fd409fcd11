"""The documentation's Python runs: programs by the lines that start them, fragments after what they take as given."""

import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.doc_blocks import PAGES, blocks, titled
from tests.doc_setups import AFTER, BEFORE, RANKS, save_llama
from tests.world import run_ranks

pytestmark = pytest.mark.ranks

FRAGMENTS = {page: [one for one in blocks(page) if one.language == "python" and not one.title] for page in PAGES}
STARTS = ("python ", "torchrun ")
PROGRAMS = {
    page: [line for one in blocks(page) if one.language == "sh" for line in one.commands if line.startswith(STARTS)]
    for page in PAGES
    if any(name.endswith(".py") for name in titled(page))
}


def run_fragments(page: str, folder: Path) -> int:
    os.chdir(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(BEFORE.get(page, ""), names)
    for number, block in enumerate(FRAGMENTS[page]):
        exec(compile(block.text, f"{page}:{block.line}", "exec"), names)
        exec(AFTER[page, number], names)
    return len(FRAGMENTS[page])


def run_program(line: str, folder: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    runpy.run_path(shlex.split(line)[-1], run_name="__main__")


@pytest.mark.parametrize("page", [page for page, found in FRAGMENTS.items() if found])
def test_fragments_do_what_their_page_says(page: str, tmp_path: Path) -> None:
    if "FOLDER" in "".join(block.text for block in FRAGMENTS[page]):
        save_llama(str(tmp_path / "llama"))
    assert set(run_ranks(RANKS.get(page, 2), run_fragments, page, tmp_path)) == {len(FRAGMENTS[page])}


@pytest.mark.parametrize("page", [page for page, found in PROGRAMS.items() if found])
def test_programs_run_as_their_page_starts_them(page: str, tmp_path: Path) -> None:
    for name, text in (titled("howto/model.md") | titled(page)).items():
        (tmp_path / name).write_text(text)
    for line in PROGRAMS[page]:
        ranks = int(line.partition("--nproc-per-node ")[2].split()[0]) if line.startswith("torchrun") else 1
        run_ranks(ranks, run_program, line, tmp_path)
    started = {shlex.split(line)[-1] for line in PROGRAMS[page]}
    imported = {name for name in titled(page) if f"{Path(name).stem}:" in "".join(titled(page).values())}
    assert {name for name in titled(page) if name.endswith(".py")} == started | (imported - {*started})
