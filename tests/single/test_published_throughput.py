"""What the planner says of published runs, as docs/planner.md has it: the page is up to date, and its errors are small.

Predictions are a function of the facts alone, so figures of the page are those that are made here again; of the rows
one in four is, as each takes some tenths of a second.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "planner.md").read_text(encoding="utf-8")
TABLE = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.partition("## All rows")[2].splitlines()}
SEVERAL = 5
"""A published paper or suite with fewer rows has no percentiles."""


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("make_planner_errors")
    finally:
        sys.path.remove(str(DOCS))


def test_rows_of_the_page_are_what_its_script_makes(made: Any) -> None:
    rows = made.rows()[::4]
    assert [TABLE[row["id"]] for row in rows] == made.lines(made.predict(row) for row in rows)


def test_the_page_has_all_rows_and_the_constants_of_all_devices(made: Any) -> None:
    assert {row["id"] for row in made.rows()} <= set(TABLE)
    for line in made.constants():
        assert line in PAGE


def test_the_summary_is_that_of_the_rows(made: Any) -> None:
    """To the digits that rows have: four of each value."""
    predictions = [made.Prediction(row, float(TABLE[row["id"]].split(" | ")[5])) for row in made.rows()]
    for told, printed in zip(made.summary(predictions), re.findall(r"^.*%.*%.*% \|$", PAGE, re.MULTILINE), strict=True):
        numbers, others = ([float(one) for one in re.findall(r"([\d.]+)%", line)] for line in (told, printed))
        assert numbers == pytest.approx(others, abs=1.01)


def test_predictions_are_near_what_was_published(made: Any) -> None:
    """Half of them within 10 %, nine of ten within 20 %, of each source as of all together."""
    errors: dict[str, list[float]] = {}
    for row in made.rows():
        error = abs(float(TABLE[row["id"]].split(" | ")[5]) / float(row["value"]) - 1)
        errors.setdefault(row["source"].split()[0], []).append(error)
        errors.setdefault("all", []).append(error)
    assert len(errors["all"]) > 150
    for name, found in errors.items():
        assert len(found) > SEVERAL, name
        assert median(found) < 0.10, name
        assert sorted(found)[int(0.9 * len(found))] < 0.20, name
