"""Every refusal of the source as one list: the kind of error, its text and its way out, found by reading the source.

    python -m tests.refusals        writes tests/golden/errors.txt anew

A line holds no file and no number, so that code may move. In the texts `{name}` is a value, `{...}` an expression and
`(one|other)` a choice; names of constants are replaced by their texts.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "zero3d"
GOLDEN = ROOT / "tests" / "golden" / "errors.txt"
ERRORS = "errors.py"
PROBLEM = "Problem"
"""A refusal of config_checks.py before it is raised: key, message, hint."""
TAKES = {PROBLEM: (1, 2)}
"""Which arguments are message and hint, where hints are no keyword."""


class Refusal(NamedTuple):
    """One place that refuses. `hint`: None where none is given; `empty`: it may come out empty."""

    kind: str
    message: str
    hint: str | None
    empty: bool
    place: str

    @property
    def entry(self) -> str:
        """As it stands in the golden file."""
        return f"{self.kind}\n  what  {_lines(self.message)}\n  hint  {_lines(self.hint or '')}\n"


@cache
def refusals() -> list[Refusal]:
    """All of them, in the order of files and lines."""
    return [one for path in sorted(SRC.rglob("*.py")) if path.name != ERRORS for one in _of_file(path)]


def listing() -> str:
    """The golden file's text: each refusal once, sorted."""
    return "\n".join(sorted({one.entry for one in refusals()}))


@cache
def kinds() -> frozenset[str]:
    """Names of the error classes: those of errors.py, and classes elsewhere that are one of them."""
    classes = [
        node for path in sorted(SRC.rglob("*.py")) for node in _tree(path).body if isinstance(node, ast.ClassDef)
    ]
    bases = {one.name: {ast.unparse(base) for base in one.bases} for one in classes}
    found, fresh = set[str](), {"Zero3dError"}
    while fresh:
        found |= fresh
        fresh = {name for name, above in bases.items() if above & found} - found
    return frozenset(found)


def _of_file(path: Path) -> Iterator[Refusal]:
    known, constants = kinds() | {PROBLEM}, _constants(path)
    for node in sorted((one for one in ast.walk(_tree(path)) if isinstance(one, ast.Call)), key=lambda one: one.lineno):
        kind = ast.unparse(node.func).rpartition(".")[2]
        given = next((one.value for one in node.keywords if one.arg == "hint"), None)
        if (kind not in known and given is None) or ast.unparse(node.func).startswith("super()"):
            continue
        what, way_out = TAKES.get(kind, (0, None))
        if way_out is not None and len(node.args) > way_out:
            given = node.args[way_out]
        message = node.args[what] if len(node.args) > what else None
        yield Refusal(
            kind if kind in known else "(raised by its caller)",
            _text(message, constants) if message else "{...}",
            _text(given, constants) if given else None,
            given is not None and _may_be_empty(given),
            f"{path.relative_to(ROOT)}:{node.lineno}",
        )


def _text(node: ast.expr, constants: dict[str, str]) -> str:
    """The template of an expression that gives a text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, constants) for part in parts)
        case ast.FormattedValue(value=value):
            return _text(value, constants)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, constants) + _text(right, constants)
        case ast.IfExp(body=one, orelse=other):
            return f"({_text(one, constants)}|{_text(other, constants)})"
        case ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.Name() | ast.Attribute():
            return f"{{{ast.unparse(node)}}}"
        case ast.Call(args=[ast.Name() | ast.Attribute() as shown], keywords=[]):
            return f"{{{ast.unparse(shown)}}}"
        case _:
            return "{...}"


def _may_be_empty(node: ast.expr) -> bool:
    """Whether a hint is, or can be, no text at all."""
    if isinstance(node, ast.IfExp):
        return _may_be_empty(node.body) or _may_be_empty(node.orelse)
    return isinstance(node, ast.Constant) and not node.value


def empty_hints() -> list[str]:
    """Places where a variable that is called hint is given no text."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(_tree(path)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            named = any(target is not None and ast.unparse(target) == "hint" for target in targets)
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and named and value is not None and _may_be_empty(value):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def _constants(path: Path) -> dict[str, str]:
    """Names of a module that stand for a text: its own, and those it imports."""
    found = {}
    for node in _tree(path).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("zero3d."):
            source = SRC / f"{str(node.module).removeprefix('zero3d.').replace('.', '/')}.py"
            theirs = _own_constants(source) if source.is_file() else {}
            found |= {one.asname or one.name: theirs[one.name] for one in node.names if one.name in theirs}
    return found | _own_constants(path)


def _own_constants(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in _tree(path).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant | ast.JoinedStr | ast.BinOp):
            text = _text(value, found)
            if isinstance(value, ast.JoinedStr) or (text and text != "{...}"):
                found[target.id] = text
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _lines(text: str) -> str:
    return text.replace("\n", "\n        ")


if __name__ == "__main__":
    GOLDEN.write_text(listing(), encoding="utf-8")
    print(f"{GOLDEN.relative_to(ROOT)}: {len({one.entry for one in refusals()})} refusals")
