"""`zero3d show schedule` as people and programs see it."""

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from zero3d.cli.main import app
from zero3d.pipeline.picture import lines
from zero3d.pipeline.schedules.registry import SCHEDULES, named
from zero3d.pipeline.simulate import Costs, simulate


def show(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["show", "schedule", *map(str, words)])


def test_json_has_the_keys_that_programs_rely_on() -> None:
    done = show("--schedule", "1f1b", "--stages", 2, "--micro-batches", 3, "--json")
    assert done.exit_code == 0 and done.stdout.count("\n") == 1
    assert json.loads(done.stdout) == {
        "ranks": [["F0", "F1", "B0", "F2", "B1", "B2"], ["F0", "B0", "F1", "B1", "F2", "B2"]],
        "bubble": 1 / 3,
        "makespan": 12,
        "peak_live": [2, 1],
    }


def test_several_stages_a_rank_are_written_out() -> None:
    found = json.loads(show("--schedule", "zbv", "--stages", 4, "--micro-batches", 8, "--json").stdout)
    assert len(found["ranks"]) == 2 and found["ranks"][0][:4] == ["F0.0", "F1.0", "F2.0", "F0.3"]
    assert found["makespan"] == 6 * 8 + 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_grid_shows_every_action_once_whatever_the_width(name: str) -> None:
    """Cells are cut where a band ends, and only their beginning has the name."""
    per_rank, ranks = SCHEDULES[name].stages_per_rank or 3, SCHEDULES[name].most_ranks or 3
    actions = named(name).actions(per_rank * ranks, ranks, 4)
    timeline = simulate(actions, Costs(transfer=0.25))
    for width in (1, 40, 1000):
        bands = lines(timeline, width)
        for rank, mine in enumerate(actions):
            words = [word for band in bands for cell in band[rank] for word in cell.text.replace("─", " ").split()]
            assert [word.split(".")[0] for word in words if word != "·"] == list(map(str, mine))
        for band in bands:
            assert len({sum(len(cell.text) for cell in row) for row in band}) == 1


def test_the_grid_is_drawn_as_in_the_papers() -> None:
    done = show("--schedule", "gpipe", "--stages", 2, "--micro-batches", 2)
    assert done.exit_code == 0
    drawn = [line.rstrip() for line in done.stdout.splitlines() if line.startswith("rank")]
    assert drawn == ["rank 0  F0 F1 ·  ·  ·  B0─── B1───", "rank 1  ·  F0 F1 B0─── B1─── ·  ·"]
    assert "9 units of time, 50.0% more than the busiest rank computes" in done.stdout


def test_lines_fit_the_width() -> None:
    done = show("--schedule", "zbh1", "--stages", 4, "--micro-batches", 40)
    assert max(map(cell_len, done.stdout.splitlines())) <= 120


def test_a_picture_is_well_formed_and_has_every_action(tmp_path: Path) -> None:
    file = tmp_path / "zbv.svg"
    done = show("--schedule", "zbv", "--stages", 8, "--micro-batches", 6, "--picture", file, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)
    space = "{http://www.w3.org/2000/svg}"
    root = xml.etree.ElementTree.parse(file).getroot()
    titles = [one.text or "" for one in root.iter(f"{space}title")]
    actions = named("zbv").actions(8, 4, 6)
    assert sorted(title.split(":")[0] for title in titles) == sorted(one.full for rank in actions for one in rank)
    assert float(root.attrib["width"]) > 6 * 6 * 26


def test_a_file_of_the_users_own_says_its_own_numbers(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("F0 F1 B0 B1\nF0 B0 F1 B1\n")
    found = json.loads(show("--schedule", file, "--json").stdout)
    assert found["ranks"] == [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]
    assert found["bubble"] == 0.5


def refused(*words: str | Path) -> dict[str, object]:
    done = show(*words, "--json")
    assert done.exit_code == 2
    event = json.loads(done.stdout)
    assert (event["event"], event["code"]) == ("error", 2) and event["hint"] and event["message"] in done.stderr
    return event


def test_what_cannot_be_shown_leaves_with_2(tmp_path: Path) -> None:
    numbers = ("--stages", 4, "--micro-batches", 8)
    assert "no schedule 'zbw'" in str(refused("--schedule", "zbw", *numbers))
    assert "2 stages a rank" in str(refused("--schedule", "zbv", *numbers, "--ranks", 3))
    assert "--micro-batches is missing" in str(refused("--schedule", "1f1b", "--stages", 4))
    assert "too many to show" in str(refused("--schedule", "1f1b", "--stages", 4, "--micro-batches", 10**9))
    assert "drawn as SVG" in str(refused("--schedule", "1f1b", *numbers, "--picture", tmp_path / "x.png"))
    assert "cannot write" in str(refused("--schedule", "1f1b", *numbers, "--picture", tmp_path / "no" / "x.svg"))
    assert "cannot read" in str(refused("--schedule", tmp_path / "none.txt"))
    bad = tmp_path / "bad.txt"
    bad.write_text("F0 B0\nF0 Q0\n")
    assert "bad.txt, line 2, word 2" in str(refused("--schedule", bad))
    bad.write_text("F0 B0 F1 B1\nF0 F1 B0 B1\n")
    assert "never ends" in str(refused("--schedule", bad))
    bad.write_bytes(b"\xff\xfe\x00")
    assert "no text" in str(refused("--schedule", bad))
