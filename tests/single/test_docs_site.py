"""The documentation's site: it builds without a warning, its links lead somewhere, it asks nothing of the network."""

import subprocess
import sys
from collections import Counter
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.doc_blocks import OTHERS, PAGES, RUN, SHOWN, blocks

ROOT = Path(__file__).parents[2]
NOT_RUN = {"it installs": 2, "it needs two machines": 1}
"""Why blocks are not run, and how many."""


class Page(HTMLParser):
    """What a page has and asks for: ids, links, and what a browser loads by itself."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        loaded = values.get("href") if tag == "link" and values.get("rel") != "canonical" else values.get("src")
        self.loads += [loaded] if loaded else []

    @cached_property
    def missing(self) -> list[str]:
        return [link for link in (*self.links, *self.loads) if not self.leads_somewhere(link)]

    def leads_somewhere(self, link: str) -> bool:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or link.startswith("data:"):
            return True
        target = (self.file.parent / unquote(parts.path)).resolve() if parts.path else self.file
        target = target / "index.html" if target.is_dir() else target
        if not target.is_file():
            return False
        return not parts.fragment or target.suffix != ".html" or unquote(parts.fragment) in page_of(target).ids


PARSED: dict[Path, Page] = {}


def page_of(file: Path) -> Page:
    if file not in PARSED:
        PARSED[file] = Page(file)
    return PARSED[file]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> list[Page]:
    folder = tmp_path_factory.mktemp("site").resolve()
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Links of the page for what is not found are absolute: it is for servers alone.
    return [page_of(file) for file in sorted(folder.rglob("*.html")) if file.name != "404.html"]


def test_every_page_is_there_and_its_links_lead_somewhere(site: list[Page]) -> None:
    assert len(site) >= len(PAGES)
    missing = {page.file.name: page.missing for page in site if page.missing}
    assert not missing


def test_nothing_is_loaded_from_elsewhere(site: list[Page]) -> None:
    elsewhere = {page.file.name: [one for one in page.loads if "//" in one] for page in site}
    assert not {name: loads for name, loads in elsewhere.items() if loads}
    styles = [file.read_text(encoding="utf-8") for file in site[0].file.parent.rglob("*.css")]
    assert styles and not [style for style in styles if "url(http" in style or "@import" in style]


def test_search_works_in_pages_that_are_opened_as_files(site: list[Page]) -> None:
    """A worker cannot start there: a script of ours stands in, and the index is a script too."""
    folder = next(page.file.parent for page in site if page.file.name == "quickstart.html")
    loads = page_of(folder / "index.html").loads
    assert any("iframe-worker" in one for one in loads) and (folder / "search" / "search_index.js").is_file()


def test_every_verb_and_every_key_has_its_place(site: list[Page]) -> None:
    folder = next(page.file.parent for page in site if page.file.name == "quickstart.html")
    commands = page_of(folder / "reference" / "commands.html").ids
    assert {"zero3d-train", "zero3d-plan", "zero3d-dryrun", "zero3d-show-layout"} <= commands
    assert {"run", "zero", "parallel", "offload"} <= page_of(folder / "configuration.html").ids
    assert {"zero3d.engine.Engine.step", "zero3d.own_loop.shard"} <= page_of(folder / "reference" / "python.html").ids


def test_every_block_of_code_is_run_or_says_why_not() -> None:
    """tests/ranks/test_docs_python.py and tests/ranks/test_docs_commands.py run what is not counted here."""
    every = [block for page in PAGES for block in blocks(page)]
    fences = sum((ROOT / "docs" / page).read_text(encoding="utf-8").count("\n```") for page in PAGES)
    assert fences == 2 * len(every), "a block that is not seen as one, as its fence is indented or has options"
    assert {block.language for block in every} <= {*RUN, *SHOWN}
    assert Counter(block.why for block in every if block.why) == NOT_RUN
    assert not [block for block in every if block.why and block.language not in RUN]
    assert {page for page in OTHERS if (ROOT / "docs" / page).exists()} >= {"field.md"}
