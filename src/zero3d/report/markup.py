"""HTML from values: all text that is not ours goes through `text` or an attribute's quotes here. Pure."""

from collections.abc import Iterable, Sequence
from html import escape

VOID = {"meta", "input", "br"}


class Markup(str):
    """Text that is HTML already; any other string is escaped where it is put into an element."""

    __slots__ = ()


def text(value: str) -> Markup:
    """As text of a page; characters that no browser shows become marks."""
    shown = "".join(one if one.isprintable() or one in "\n\t" else "�" for one in value)
    return Markup(escape(shown))


def element(tag: str, /, *inside: str | Markup, **attributes: str | bool) -> Markup:
    """`class_` is class, `aria_label` aria-label; an attribute that is True stands alone, one that is False not at all.

    >>> element("a", "1 < 2", href="#x")
    '<a href="#x">1 &lt; 2</a>'
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if tag in VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(inside)}</{tag}>")


def join(parts: Iterable[str | Markup], between: str = "") -> Markup:
    """One after the other."""
    return Markup(between.join(one if isinstance(one, Markup) else text(one) for one in parts))


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> Markup:
    """A table that scrolls by itself where it is wider than the page; `numbers`: all but the first column."""
    kind = "numbers" if numbers else "words"
    head = element("tr", *(element("th", one, scope="col") for one in heads))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    inside = element("table", element("caption", caption), element("thead", head), element("tbody", *body), class_=kind)
    return element("div", inside, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _attribute(key: str, value: str | bool) -> str:
    name = key.rstrip("_").replace("_", "-")
    if isinstance(value, bool):
        return f" {name}" if value else ""
    return f' {name}="{escape(value)}"'
