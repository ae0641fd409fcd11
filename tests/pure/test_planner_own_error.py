"""What `zero3d plan` says of its own error is what docs/planner.md has, and public models have sizes that can be."""

import re
from pathlib import Path

import pytest

from zero3d.config import Config
from zero3d.planner import own_error
from zero3d.planner.public_models import PUBLIC, find_model

DOCS = Path(__file__).parents[2] / "docs" / "planner.md"


def test_its_error_is_that_of_the_docs() -> None:
    found = re.search(r"\| \*\*all\*\* \| (\d+) \| ([\d.]+)% \| ([\d.]+)% \|", DOCS.read_text(encoding="utf-8"))
    assert found is not None
    assert int(found[1]) == own_error.RUNS
    assert (float(found[2]), float(found[3])) == pytest.approx((own_error.MEDIAN * 100, own_error.NINETIETH * 100))


def test_its_error_on_a_calibrated_machine_is_that_of_the_docs() -> None:
    text = " ".join(DOCS.read_text(encoding="utf-8").partition("## On a machine that was calibrated")[2].split())
    found = re.search(r"the median error was ([\d.]+) %, the largest (\d+) %", text)
    assert found is not None
    said = (own_error.CALIBRATED_MEDIAN * 100, own_error.CALIBRATED_LARGEST * 100)
    assert (float(found[1]), float(found[2])) == pytest.approx(said)
    assert "11.6% in the median and 27%" in own_error.told(preset=False)
    assert "184 published runs" in own_error.told(preset=True)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_are_configurations(name: str) -> None:
    model = find_model(name.upper().replace("-", " "))
    assert model is PUBLIC[name] and model.source
    assert Config.load({"model": model.section()}).model.width == model.width
