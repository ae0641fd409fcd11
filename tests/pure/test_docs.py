"""The documentation says what is there: pages that are made, files that are named, examples that run."""

import doctest
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`([\w./-]+\.(?:py|toml|md|svg|txt))(?:::(\w+))?`")
"""Files, and tests in them, that a page names in code type."""
DOCTESTS = [
    "layout",
    "cli.show_checkpoint",
    "config",
    "comm.bucket",
    "offload.budget",
    "optim.learning_rate",
    "pipeline.action",
    "pipeline.bubbles",
    "pipeline.partition",
    *(f"pipeline.schedules.{name}" for name in ("accumulate", "gpipe", "one_f_one_b", "placement", "zero_bubble")),
    "calibrate.fit",
    "cli.memory",
    "planner.activations",
    "planner.estimators",
    "planner.infinity",
    "planner.memory",
    "planner.traffic",
    *(f"report.{name}" for name in ("holdings", "lines", "markup", "units")),
]
MADE_BY_RUNS = {"config.toml", "timeline.svg"}


def test_the_page_of_options_is_what_its_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run: python docs/make_configuration.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    files = {link: page.parent / link.partition("#")[0] for link in links if not link.startswith("#")}
    assert not [link for link, file in files.items() if not file.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_headings_exist(page: Path) -> None:
    missing = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        name, mark, anchor = link.partition("#")
        if mark and "://" not in link:
            target = page.parent / name if name else page
            heads = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            missing += [link] if anchor not in anchors else []
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_tests_exist(page: Path) -> None:
    missing = []
    for name, test in NAMED.findall(page.read_text(encoding="utf-8")):
        places = [place / name for place in (ROOT, ROOT / "src" / "zero3d", page.parent)]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            missing += [name] if name not in MADE_BY_RUNS else []
        elif test and f"def {test}(" not in found.read_text(encoding="utf-8"):
            missing.append(f"{name}::{test}")
    assert not missing


def test_the_readme_shows_lines_of_the_example() -> None:
    """`...` stands for what is left out."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    example = (ROOT / "examples" / "engine.py").read_text(encoding="utf-8")
    lines = {line.strip() for line in example.splitlines()} | {"..."}
    assert blocks
    assert not [line for block in blocks for line in block.splitlines() if line.strip() not in lines]


@pytest.mark.parametrize("name", DOCTESTS)
def test_examples_in_docstrings(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"zero3d.{name}"))
    assert attempted and not failed


def test_the_chinese_readme_has_the_same_blocks_tables_and_links() -> None:
    """It says the same in other words: what is typed and measured, and where links lead, is equal."""
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    block = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    assert block.findall(english) == block.findall(chinese)
    links = [
        sorted({link for link in LINK.findall(text) if "README" not in link and link[0] != "#"})
        for text in (english, chinese)
    ]
    assert links[0] == links[1]
    rows = [[line.count("|") for line in text.splitlines() if line.startswith("|")] for text in (english, chinese)]
    assert rows[0] == rows[1]
    numbers = [sorted(re.findall(r"\d+\.\d+", block.sub("", text))) for text in (english, chinese)]
    assert numbers[0] == numbers[1]
