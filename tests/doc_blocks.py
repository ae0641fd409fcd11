"""Blocks of code on the pages of the documentation, and how each is tested."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OTHERS = {
    "field.md": "launchers of many machines: none here; tests/ranks/test_hosts.py, test_elastic.py run parts",
    "trainer.md": "tests/ranks/test_trainer.py",
}
"""Pages whose blocks other tests run, or none can."""
PAGES = [page for file in sorted(DOCS.rglob("*.md")) if (page := file.relative_to(DOCS).as_posix()) not in OTHERS]

FENCE = re.compile(
    r'^(?:<!-- not run: (?P<why>.+?) -->\n)?```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
SHOWN = ("", "text")
"""Languages of what is shown: drawings, messages, and what commands print."""
RUN = ("python", "sh", "toml", "json")


@dataclass(frozen=True)
class Block:
    """One block. `why`: what keeps it from being run here; None where a test runs it."""

    page: str
    line: int
    language: str
    title: str | None
    text: str
    why: str | None

    @property
    def commands(self) -> list[str]:
        """The lines that a reader types, without their comments."""
        joined = self.text.replace("\\\n", " ")
        lines = joined.splitlines()
        if self.language in SHOWN:
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in lines) if line]

    @property
    def prints(self) -> list[str]:
        """Of a command that is shown with what it prints: that, line by line."""
        lines = self.text.splitlines()
        return lines[1:] if self.language in SHOWN and lines[0].startswith("$ ") else []


@cache
def blocks(page: str) -> tuple[Block, ...]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return tuple(
        Block(page, text[: found.start()].count("\n") + 1, *found.group("language", "title", "text", "why"))
        for found in FENCE.finditer(text)
    )


def titled(page: str) -> dict[str, str]:
    """The files that a page tells its reader to save."""
    return {block.title: block.text for block in blocks(page) if block.title}
