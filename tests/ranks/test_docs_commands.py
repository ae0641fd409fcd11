"""The documentation's commands run, and print what pages show of them; its configurations are valid."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.doc_blocks import PAGES, Block, blocks, titled
from tests.doc_commands import fill, run, shortened
from tests.doc_setups import save_llama
from zero3d import Config

pytestmark = [pytest.mark.ranks, pytest.mark.cli]

ELSEWHERE = ("python ", "torchrun ")
"""Lines that tests/ranks/test_docs_python.py runs."""
LINES = {
    page: [line for one in blocks(page) if one.language == "sh" and not one.why for line in one.commands]
    for page in PAGES
}
COMMANDS = {page: [line for line in lines if not line.startswith(ELSEWHERE)] for page, lines in LINES.items()}
SHOWN = [one for page in PAGES for one in blocks(page) if one.prints]
DATA = [one for page in PAGES for one in blocks(page) if one.language in ("toml", "json")]
GIVEN = {
    "howto/export.md": ["zero3d train examples/demo.toml"],
    "howto/watch.md": ["zero3d train examples/demo.toml"],
}
"""What has run before a page begins."""
FIRST = {line: page for page in reversed(PAGES) for line in COMMANDS[page]}
"""The first page that has a line."""


def once(page: str) -> list[str]:
    """The lines to run: what another page has too runs there, unless lines here look at what came of it."""
    alone = any("runs/" in line or "plan.toml" in line or "--resume" in line for line in COMMANDS[page])
    return [line for line in COMMANDS[page] if alone or FIRST[line] == page]


def where(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.parametrize("page", [page for page in PAGES if once(page)])
def test_commands_run(page: str, tmp_path: Path) -> None:
    fill(tmp_path, titled("howto/data.md") | titled(page))
    save_llama(str(tmp_path / "llama"))
    steps = 2
    for line in (*GIVEN.get(page, ()), *once(page)):
        assert line.startswith("zero3d "), f"{line}: what runs this?"
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        words = shortened(line, tmp_path, steps := steps + 1)
        code, _, told = run(words, tmp_path)
        assert code == 0, f"{' '.join(words)} left with {code}:\n{told}"


@pytest.mark.parametrize("block", SHOWN, ids=where)
def test_commands_print_what_their_page_shows(block: Block, tmp_path: Path) -> None:
    fill(tmp_path, {}, smaller=False)
    (line,) = block.commands
    code, printed, told = run(line.split()[1:], tmp_path)
    assert code == 0, told
    there = [one.rstrip() for one in printed.splitlines()]
    assert not [one for one in block.prints if one.rstrip() and one.rstrip() not in there], printed


@pytest.mark.parametrize("block", DATA, ids=where)
def test_configurations_are_valid(block: Block) -> None:
    """JSON is of other tools, and is a file that a command on its page reads."""
    if block.language == "toml":
        Config.load(tomllib.loads(block.text))
    else:
        assert json.loads(block.text) and any(f" {block.title}" in line for line in COMMANDS[block.page])
