"""The page of `zero3d report`: whole, without a network, and with all that a user wrote as text."""

import html
import importlib.util
import json
import re
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

from tests.report_runs import config, done_line, fill, lines, step_line
from zero3d.cli.main import app
from zero3d.records import CONFIG, METRICS
from zero3d.report import contents
from zero3d.report.figure import BLUE, GREEN, GREY, PURPLE, VERMILION
from zero3d.report.page import page
from zero3d.report.sections import head_and_sections

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
LIBRARY = "var Plotly = {};"
"""In place of plotly's: five megabytes less to parse."""
VOID = {"meta", "br", "img"}
FIGURES = ["loss", "throughput", "seconds", "norm", "lr", "memory", "timeline", "time", "sent"]


class Parsed(HTMLParser):
    """Elements in order, (tag, attributes, text); what is open at the end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.elements[self.open[-1]][0] != tag:
            self.unbalanced.append(tag)
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        for index in self.open[-1:]:
            self.elements[index][2].append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for one, attributes, text in self.elements if one == tag]


def made(folder: Path) -> tuple[str, Parsed]:
    text = page(*head_and_sections(contents.read(folder)), LIBRARY)
    parsed = Parsed(text)
    assert not parsed.open and not parsed.unbalanced
    return text, parsed


def specs(parsed: Parsed) -> list[dict[str, Any]]:
    data = [text for attributes, text in parsed.all("script") if attributes.get("type") == "application/json"]
    assert len(data) == 1
    found: list[dict[str, Any]] = json.loads(data[0])
    return found


def test_it_is_one_page_with_headings_figures_and_tables(tmp_path: Path) -> None:
    _, parsed = made(fill(tmp_path / "run"))
    assert [text for _, text in parsed.all("h1")] == ["made by hand"]
    titles = [text for _, text in parsed.all("h2")]
    assert titles == ["Loss and speed", "Memory", "Time", "Who holds what", "Configuration", "Checkpoints"]
    ids = [attributes["id"] for _, attributes, _ in parsed.elements if "id" in attributes]
    assert len(ids) == len({*ids})
    for attributes, text in parsed.all("a"):
        assert attributes["href"] in {f"#{one}" for one in ids}, text
    assert parsed.all("html")[0][0]["lang"] == "en"
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [
        one for one, _ in parsed.all("meta")
    ]
    # Each figure is named for who does not see it, and has its numbers beside it.
    plots = [one for one, _ in parsed.all("div") if one.get("class") == "plot"]
    assert [one["id"] for one in plots] == [f"plot-{name}" for name in FIGURES]
    assert all(one["role"] == "img" and len(one["aria-label"] or "") > 20 for one in plots)
    assert len(parsed.all("figure")) == len(parsed.all("figcaption")) == len(plots)
    assert sum(text.endswith(" as a table") for _, text in parsed.all("summary")) == len(plots)
    assert len(parsed.all("table")) == len(parsed.all("caption")) >= len(plots) + 3
    assert all(one.get("scope") in ("col", "row") and text for one, text in parsed.all("th"))
    scrolling = [one for one, _ in parsed.all("div") if one.get("class") == "scroll"]
    assert len(scrolling) == len(parsed.all("table")), "a wide table scrolls by itself, by keyboard too"
    assert all(one["tabindex"] == "0" and one["role"] == "region" and one["aria-label"] for one in scrolling)


def test_its_figures_are_such_as_plotly_draws(tmp_path: Path) -> None:
    """plotly's own check knows every property of its JavaScript."""
    offload = {"compute": 0.4, "down": 0.1, "update": 0.2, "up": 0.05, "hidden": 0.3}
    folder = fill(tmp_path / "run")
    events = [step_line(number, offload=offload) for number in range(1, 11)]
    (folder / METRICS).write_text(lines(*events, done_line(offload=offload)))
    _, parsed = made(folder)
    found = specs(parsed)
    assert {one["name"] for one in found} == {*FIGURES, "offload"}
    for one in found:
        go.Figure({"data": one["data"], "layout": one["layout"]})
        assert all(trace.get("x") for trace in one["data"]), one["name"]
    waiting = next(one for one in found if one["name"] == "offload")["data"][1]
    assert waiting["name"] == "waiting for offload" and waiting["x"][0] == pytest.approx(50), "350 ms less 300 hidden"


def test_figures_have_the_numbers_of_the_run(tmp_path: Path) -> None:
    _, parsed = made(fill(tmp_path / "run"))
    found = {one["name"]: one["data"] for one in specs(parsed)}
    assert found["loss"][0]["x"] == [*range(1, 11)] and found["loss"][0]["y"][0] == pytest.approx(4.9)
    assert (found["loss"][1]["x"], found["loss"][1]["y"]) == ([10], [4.75])
    assert found["throughput"][0]["y"] == [2000] * 10
    weights = found["memory"][0]
    assert weights["name"] == "weights" and weights["x"] == [80, 80, 72, 72]
    assert weights["y"] == [
        *("ranks 0-1, model states", "ranks 0-1, measured"),
        *("ranks 2-3, model states", "ranks 2-3, measured"),
    ]
    assert {one["name"]: one["x"] for one in found["sent"]} == {"over dp": [40, 36], "over pp": [64, 64]}
    forwards = found["timeline"][0]
    assert forwards["name"] == "forward" and len(forwards["x"]) == 2 * 2 * 4, (
        "2 ranks, at mean times and measured, 4 each"
    )
    assert forwards["x"] == pytest.approx([1] * 16) and forwards["base"][:4] == pytest.approx([0, 1, 6, 9])


def test_a_table_that_goes_on_at_a_side_shows_it() -> None:
    """On a phone it was cut there; a picture is no test, but without covers that move there is no such shade."""
    style = (Path(contents.__file__).parent / "page.css").read_text(encoding="utf-8").partition(".scroll {")[2]
    rule = style.partition("}")[0]
    assert rule.count("local") == 2 == rule.count("var(--shade)")


def test_nothing_in_it_needs_a_network(tmp_path: Path) -> None:
    text, parsed = made(fill(tmp_path / "run"))
    for tag, attributes, _ in parsed.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img", "form"), tag
        assert "src" not in attributes and "srcset" not in attributes and "style" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?://", text)
    policy = next(one["content"] for one, _ in parsed.all("meta") if one.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy and "http" not in policy
    run = [text for attributes, text in parsed.all("script") if attributes.get("type") != "application/json"]
    hashes = [b64encode(sha256(one.encode()).digest()).decode() for one in run]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes, "those scripts and no other"
    assert run[0] == LIBRARY and len(run) == 2


def test_what_a_user_wrote_is_text(tmp_path: Path) -> None:
    """A name, a source, a note, kinds and axes of files that somebody else has made."""
    folder = fill(tmp_path / "run", made=config(name=EVIL, out=EVIL))
    note = {"event": "note", "message": EVIL}
    done = done_line(held_bytes={EVIL: [1, 1, 1, 1]}, sent_bytes={EVIL: [1, 1, 1, 1]})
    (folder / METRICS).write_text(lines(note, step_line(1), done))
    dryrun = {"world": 4, "ranks": [{"rank": 0, "peak_by_kind": {EVIL: 5}}]}
    (folder / contents.DRYRUN).write_text(json.dumps(dryrun))
    text, parsed = made(folder)
    assert parsed.all("h1")[0][1] == EVIL and parsed.all("title")[0][1].startswith(EVIL)
    assert not parsed.all("img") and len(parsed.all("script")) == 3
    assert "<script>alert" not in text and "<img" not in text
    # plotly reads a little HTML in names: there they are escaped a second time.
    drawn = [trace["name"] for one in specs(parsed) for trace in one["data"]]
    escaped = html.escape(EVIL, quote=False)
    assert escaped in drawn and f"over {escaped}" in drawn
    assert not [name for name in drawn if "<" in name]


def test_configuration_differing_keys_come_first(tmp_path: Path) -> None:
    _, parsed = made(fill(tmp_path / "run"))
    captions = [text for _, text in parsed.all("caption")]
    first, second = captions.index("What differs from the defaults"), captions.index("As by default")
    assert first < second
    heads = [text for one, text in parsed.all("th") if one.get("scope") == "row"]
    assert heads.index("zero.level") < heads.index("optimizer.lr"), "1 is not the default, 1e-3 is"
    assert sum(one == "zero.level" for one in heads) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: fill(folder, done=False), "The run did not come to its end"),
        (lambda folder: (folder / CONFIG).unlink(), "There is no config.toml"),
        (lambda folder: (folder / METRICS).unlink(), "There is no metrics.jsonl"),
        (lambda folder: (folder / METRICS).write_text("{\n"), "Line 1 of metrics.jsonl cannot be read"),
        (lambda folder: (folder / METRICS).write_text("{"), "is cut short"),
        (lambda folder: (folder / METRICS).write_bytes(b"\xff\xfe\x00"), "metrics.jsonl"),
        (lambda folder: (folder / METRICS).write_text(lines(step_line(3), _resumed(2))), "resumed after step 2"),
        (lambda folder: (folder / "trace.json").write_text("[1"), "trace.json is not as --trace writes it"),
    ],
)
def test_whatever_state_a_run_is_in_it_has_a_page_that_says_so(tmp_path: Path, change: Any, told: str) -> None:
    change(fill(tmp_path / "run"))
    _, parsed = made(tmp_path / "run")
    assert any(told in text for _, text in parsed.all("li"))


def _resumed(step: int) -> dict[str, str]:
    return {"event": "note", "message": f"goes on from out/step (step {step}: 5 parameters)"}


def test_lines_are_seen_on_a_white_page_and_on_a_dark_one() -> None:
    """WCAG 2.1, 1.4.11: 3 to 1."""
    for colour in (BLUE, VERMILION, GREEN, PURPLE, GREY):
        for ground in ("#ffffff", "#181c20"):
            light, dark = sorted((_luminance(colour), _luminance(ground)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= (2.8 if colour == PURPLE else 3), (colour, ground)


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_command_writes_the_page_into_the_folder_or_where_one_says(tmp_path: Path) -> None:
    folder = fill(tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0 and f"{folder / 'report.html'}: " in done.stdout
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "Plotly" in text and len(text) > 1_000_000, "the library is in it"
    other = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(other), "--json"])
    assert done.exit_code == 0 and other.read_text(encoding="utf-8") == text
    told = json.loads(done.stdout)
    assert told["page"] == str(other) and told["state"] == "done" and told["heldout_loss"] == 4.75
    assert told["held_bytes"][0] == {
        "ranks": [0, 1],
        "planned": {"weights": 80, "gradients": 80, "optimizer": 160},
        "measured": {"weights": 80, "gradients": 80, "optimizer": 160, "activations": 512},
    }
    assert [one["rank"] for one in told["spent"]] == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"], "nothing is left beside it"


def test_what_the_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "run", traced=False)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    assert done.exit_code == 2 and str(folder) in json.loads(done.stdout)["hint"]
    for out in (tmp_path / "none" / "page.html", tmp_path):
        done = CliRunner().invoke(app, ["report", str(folder), "--out", str(out)])
        assert done.exit_code == 2 and str(out) in done.stderr
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name))
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 2 and done.stderr.splitlines()[-1] == "pip install zero3d[report]"
    assert not (folder / "report.html").exists()


def test_it_loads_no_torch(tmp_path: Path) -> None:
    folder = fill(tmp_path / "run")
    code = (
        f"import sys; sys.argv[1:] = ['report', {str(folder)!r}]\n"
        "from zero3d.cli.main import entry\n"
        "try: entry()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
