"""Arguments in docstrings, which are lines of `name: text`, as lists; mkdocs.yml names this file as an extension."""

import re
from typing import Any

import griffe

NAMED = re.compile(r"^((?:\w+(?:\([^)]*\))?)(?:, \w+)*): (?=\S)")


class NamedLines(griffe.Extension):
    """Changes the text of each docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)


def as_lists(text: str) -> str:
    """Each paragraph whose lines begin with names becomes a list; what is indented further belongs to its line."""
    return "\n\n".join(_listed(paragraph) for paragraph in text.split("\n\n"))


def _listed(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if not lines or not NAMED.match(lines[0]) or any(not NAMED.match(one) and not one.startswith(" ") for one in lines):
        return paragraph
    return "\n".join(NAMED.sub(r"- **\1**: ", one) for one in lines)
