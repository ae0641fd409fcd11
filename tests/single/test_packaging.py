"""The wheel as it is published: built here from a copy of the source, without a network, and looked into."""

import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import zero3d

ROOT = Path(__file__).parents[2]
SOURCE = ("pyproject.toml", "README.md", "LICENSE", "src")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built in a copy: what an older build has left beside the source must not get into it."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, copy / name)
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "out", "."]
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = (copy / "out").iterdir()
    assert built.name == f"zero3d-{zero3d.__version__}-py3-none-any.whl"  # Pure Python: one for all machines.
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(text(wheel, "METADATA"))


def text(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"zero3d-{zero3d.__version__}.dist-info/{name}").decode()


def test_the_package_and_nothing_else_is_in_it(wheel: zipfile.ZipFile) -> None:
    """All modules, the mark of types and what the report's page is made of; no tests, no documentation."""
    source = ROOT / "src"
    files = {
        str(one.relative_to(source)) for one in source.rglob("*") if one.suffix in (".py", ".css", ".js", ".typed")
    }
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {"zero3d/py.typed", "zero3d/report/page.css", "zero3d/report/page.js"} <= inside
    assert files <= inside
    assert {name.partition("/")[0] for name in inside} == {"zero3d"}
    assert not [
        name for name in inside if Path(name).suffix not in (".py", ".css", ".js", "") and "py.typed" not in name
    ]


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    assert "zero3d = zero3d.__main__:entry" in text(wheel, "entry_points.txt")


def test_what_it_needs_and_what_it_can_use(metadata: Message) -> None:
    needed = metadata.get_all("Requires-Dist") or []
    always = {one.partition(">")[0] for one in needed if "extra ==" not in one}
    assert always == {"numpy", "pydantic", "rich", "safetensors", "torch", "typer"}
    extras = {"all", "dev", "docs", "hf", "remote", "report", "tensorboard", "tokenizers", "transformers"}
    assert extras <= set(metadata.get_all("Provides-Extra") or [])


def test_what_it_says_of_itself(metadata: Message, wheel: zipfile.ZipFile) -> None:
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[0] in str(metadata.get_payload())
    assert "Apache License" in text(wheel, "licenses/LICENSE")
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert pythons <= set(metadata.get_all("Classifier") or [])


def test_the_version_is_one(metadata: Message) -> None:
    assert metadata["Version"] == zero3d.__version__
