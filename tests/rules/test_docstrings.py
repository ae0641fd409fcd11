"""What users call says what it does, and names the errors that it raises itself. Reads source text alone."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[2] / "src" / "zero3d"
Defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Public(NamedTuple):
    """A name that users may use, and where it is defined."""

    name: str
    node: Defined
    owner: str = ""
    """Its class' text."""

    @property
    def text(self) -> str:
        return ast.get_docstring(self.node) or ""


@cache
def tree(module: str) -> ast.Module:
    file = SRC.parent / f"{module.replace('.', '/')}.py"
    return ast.parse((file if file.is_file() else file.with_suffix("") / "__init__.py").read_text(encoding="utf-8"))


def exported() -> Iterator[Public]:
    """`zero3d.__all__`, each where it comes from, and the public members of its classes."""
    package = tree("zero3d")
    values = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in package.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "_NEED_TORCH", "_INSIDE")
    }
    home = {
        one.name: str(node.module)
        for node in ast.walk(package)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("zero3d")
        for one in node.names
    } | values["_NEED_TORCH"]
    for name in values["__all__"]:
        inside = values["_INSIDE"].get(name, name)
        (node,) = (one for one in tree(home[name]).body if isinstance(one, Defined) and one.name == inside)
        yield Public(name, node)
        if isinstance(node, ast.ClassDef):
            yield from (
                Public(f"{name}.{one.name}", one, ast.get_docstring(node) or "")
                for one in node.body
                if isinstance(one, Defined) and not one.name.startswith("_")
            )


PUBLIC = list(exported())


@pytest.mark.parametrize("public", PUBLIC, ids=[one.name for one in PUBLIC])
def test_public_names_say_what_they_are(public: Public) -> None:
    """Members may be told of in their class' text."""
    assert public.text or f"`{public.name.rpartition('.')[2]}`" in public.owner


@pytest.mark.parametrize("public", PUBLIC, ids=[one.name for one in PUBLIC])
def test_errors_that_are_raised_are_named(public: Public) -> None:
    """Those that stand in the function itself, or in the `__init__` of the class; what it calls says its own."""
    bodies = (
        [public.node]
        if not isinstance(public.node, ast.ClassDef)
        else [one for one in public.node.body if isinstance(one, Defined) and one.name == "__init__"]
    )
    raised = {
        ast.unparse(node.exc.func)
        for body in bodies
        for node in ast.walk(body)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func).endswith("Error")
    }
    known = public.text + "".join(ast.get_docstring(body) or "" for body in bodies)
    assert not {name for name in raised if name not in known}


def test_the_list_reaches_members() -> None:
    assert {"Engine.step", "Sharded.step", "Config.load", "rehearse", "StepReport"} <= {one.name for one in PUBLIC}
