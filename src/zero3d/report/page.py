"""The page: one file that holds its style, its scripts and all numbers, and loads nothing. Pure.

A policy in its head lets run the two scripts that are written here and no other, and forbids all network: were some
text of a user's not escaped, it would not run.
"""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any

from zero3d.report.figure import Figure
from zero3d.report.markup import Markup, element, join, table

STATES = {"done": "came to its end", "running": "still running", "cut short": "did not come to its end"}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, what stands below it, and figures beside each other. `name`: its id."""

    name: str
    title: str
    parts: Sequence[Markup] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True, kw_only=True)
class Head:
    """What stands above all sections. facts: (what, how much, a word more)."""

    title: str
    about: str
    state: str
    notices: Sequence[str]
    facts: Sequence[tuple[str, str, str]]
    foot: str


def page(head: Head, sections: Sequence[Section], plotly: str) -> str:
    """The whole text of the file; `plotly`: its JavaScript library."""
    figures = [figure for section in sections for figure in section.figures]
    scripts = [plotly, _own("page.js")] if figures else []
    body = [
        element("a", "Skip to the report", href="#report", class_="skip"),
        _header(head),
        _navigation(sections),
        element("main", *map(_section, sections), id="report", tabindex="-1"),
        element("footer", element("p", head.foot)),
        *([_data([figure.spec for figure in figures])] if figures else []),
        *(_script(one) for one in scripts),
    ]
    top = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{head.title}: a run of zero3d"),
        element("style", Markup(_own("page.css"))),
    ]
    whole = element("html", element("head", *top), "\n", element("body", *body), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def _own(name: str) -> str:
    return files("zero3d.report").joinpath(name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(f"'sha256-{b64encode(sha256(one.encode()).digest()).decode()}'" for one in scripts)
    # plotly writes styles of its own into the page, and has pictures as data.
    return (
        f"default-src 'none'; script-src {hashes or chr(39) + 'none' + chr(39)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _script(code: str) -> Markup:
    assert "</script" not in code.lower(), "it would end there"
    return element("script", Markup(code))


def _data(specs: Sequence[Mapping[str, Any]]) -> Markup:
    """JSON as a block that no browser runs; `<` is written so that nothing in it ends the block."""
    text = json.dumps(specs, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return element("script", Markup(text), type="application/json", id="figures")


def _header(head: Head) -> Markup:
    facts = [
        element("div", element("dt", what), element("dd", much, *([element("small", more)] if more else [])))
        for what, much, more in head.facts
    ]
    notices = element(
        "section",
        element("h2", "What to know of this run", class_="state", id="notices"),
        element("ul", *(element("li", one) for one in head.notices)),
        class_="notices",
        aria_labelledby="notices",
    )
    return element(
        "header",
        element("h1", head.title),
        element("p", head.about, class_="faint"),
        element("p", "State: ", element("span", head.state, class_="state")),
        *([notices] if head.notices else []),
        element("dl", *facts, class_="tiles"),
    )


def _navigation(sections: Sequence[Section]) -> Markup:
    links = [element("li", element("a", one.title, href=f"#{one.name}")) for one in sections]
    return element("nav", element("ul", *links), aria_label="Sections")


def _section(one: Section) -> Markup:
    drawn = [element("div", *map(_figure, one.figures, _wide(one.figures)), class_="figures")] if one.figures else []
    heading = element("h2", one.title, id=f"{one.name}-title")
    return element("section", heading, *drawn, *one.parts, id=one.name, aria_labelledby=f"{one.name}-title")


def _wide(figures: Sequence[Figure]) -> list[bool]:
    """Which of them take a whole row: those that say so, and one that would stand alone in half a row."""
    found: list[bool] = []
    half = False
    for index, one in enumerate(figures):
        alone = not half and (index + 1 == len(figures) or figures[index + 1].wide)
        found.append(one.wide or alone)
        half = not found[-1] and not half
    return found


def _figure(one: Figure, wide: bool) -> Markup:
    notes = [element("p", one.note)] if one.note else []
    caption = element("figcaption", element("h3", one.title), element("p", one.told), *notes)
    drawing = element("div", id=f"plot-{one.name}", class_="plot", role="img", aria_label=f"{one.title}. {one.told}")
    numbers = table(one.table.caption, one.table.heads, one.table.rows)
    beside = element("details", element("summary", f"{one.title} as a table"), numbers)
    return element("figure", caption, drawing, beside, class_="wide" if wide else "half")


def card(*parts: Markup) -> Markup:
    """Parts with a frame around them."""
    return element("div", *parts, class_="card")


def folded(title: str, *parts: Markup) -> Markup:
    """Parts that are shown when asked for."""
    return element("details", element("summary", title), join(parts))
