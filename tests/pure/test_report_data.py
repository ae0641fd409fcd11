"""What `zero3d report` reads and counts, by values."""

import json
import math
from pathlib import Path

import pytest

from tests.report_runs import HELD, done_line, fill, lines, plan, step_line, trace
from zero3d.errors import DataError, UsageError
from zero3d.layout import Place
from zero3d.records import CONFIG, METRICS, PLAN, TRACE
from zero3d.report import contents, places
from zero3d.report.curves import thin
from zero3d.report.facts import facts
from zero3d.report.gantt import gantt
from zero3d.report.holdings import holdings, kinds_of, on_device
from zero3d.report.lines import parse
from zero3d.report.traced import read_trace, spent
from zero3d.trace.chrome import chrome
from zero3d.trace.timelines import measured, planned


def test_lines_of_a_run_that_came_to_its_end() -> None:
    found = parse(lines(*(step_line(number) for number in (1, 2, 3)), done_line(steps=3)))
    assert [step.number for step in found.steps] == [1, 2, 3] and found.last_step == 3
    assert found.steps[1].loss == 4.8 and found.steps[1].tokens_per_second == 2000
    assert found.done is not None and found.done["heldout_loss"] == 4.75
    assert not found.problems and not found.resumed


def test_a_broken_line_is_left_out_and_told_by_its_number() -> None:
    text = lines(step_line(1)) + "{not json\n" + lines(step_line(2, loss="x"), [1], step_line(3), done_line(steps=3))  # type: ignore[arg-type]
    found = parse(text)
    assert [step.number for step in found.steps] == [1, 3] and found.done
    assert found.problems == ["Lines 2, 3, 4 of metrics.jsonl cannot be read and are left out."]


def test_a_last_line_that_was_cut_short() -> None:
    found = parse(lines(step_line(1), step_line(2)) + '{"event": "step", "st')
    assert [step.number for step in found.steps] == [1, 2] and found.done is None
    assert len(found.problems) == 1 and "cut short" in found.problems[0]


def test_numbers_that_were_not_finite_are_gaps() -> None:
    found = parse(lines(step_line(1), step_line(2, loss=None, grad_norm=None), step_line(3)))
    assert math.isnan(found.steps[1].loss) and not found.problems
    assert thin(found.steps, lambda step: step.loss) == ([1, 2, 3], [4.9, None, 4.7])


def test_a_resumed_run_counts_each_step_once() -> None:
    """Steps after the checkpoint are made again; the end of the earlier part is no end of the run."""
    goes_on = {"event": "note", "message": "goes on from out/checkpoints/step-00000002 (step 2: 5 parameters, ..)"}
    first = [step_line(1), step_line(2), step_line(3), done_line(steps=3)]
    found = parse(lines(*first, goes_on, step_line(3, loss=1.0), step_line(4)))
    assert [step.number for step in found.steps] == [1, 2, 3, 4] and found.steps[2].loss == 1.0
    assert found.resumed == [2] and found.done is None and not found.problems


def test_of_many_steps_points_are_means() -> None:
    steps = parse(lines(*(step_line(number, loss=float(number)) for number in range(1, 11)))).steps
    assert thin(steps, lambda step: step.loss, most=4) == ([3, 6, 9, 10], [2.0, 5.0, 8.0, 10.0])


def test_a_trace_is_read_back_as_it_was() -> None:
    """But for times, which the file has in microseconds with three digits, and the order of spans."""
    made = trace()
    found = read_trace(chrome(made))
    assert found.layout == made.layout and found.steps == made.steps
    for mine, theirs in zip(found.ranks, made.ranks, strict=True):
        assert len(mine) == len(theirs)
        for one, other in zip(sorted(mine, key=_place), sorted(theirs, key=_place), strict=True):
            assert (one.what, one.sort, one.step, one.axis, one.queue) == (
                other.what,
                other.sort,
                other.step,
                other.axis,
                other.queue,
            )
            assert dict(one.facts) == dict(other.facts)
            assert one.start == pytest.approx(other.start, abs=1e-8) and one.end == pytest.approx(other.end, abs=1e-8)
    assert measured(found, 3).makespan == pytest.approx(measured(made, 3).makespan)
    assert planned(found).bubble == pytest.approx(planned(made).bubble)


def _place(span: object) -> tuple[object, ...]:
    return (span.step, span.sort, span.what)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"traceEvents": []}',
        '{"traceEvents": [3]}',
        '{"traceEvents": [{"name": "process_name", "args": {"name": "rank 1 (dp 1, tp 0, pp 0)"}}]}',
        chrome(trace())[:-100],
        chrome(trace()).replace('"cat": "action"', '"cat": "part"'),
        chrome(trace()).replace('"kind": "F"', '"kind": "X"'),
        chrome(trace()).replace('"dur": 1000.0', '"dur": NaN'),
    ],
)
def test_what_is_no_trace_of_ours_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"trace\.json is not as --trace writes it"):
        read_trace(text)


def test_where_the_time_of_a_step_went() -> None:
    """4 forwards of 1 ms, 4 backwards of 2, an update of 2 of which 1 is a wait, and a step of 1 more after 15 ms."""
    for one in spent(trace()):
        found = {name: round(seconds * 1e3, 6) for name, seconds in one.seconds.items()}
        assert found == {"forward": 4, "backward": 8, "update": 1, "wait for dp": 1, "other": 4}, one.rank
        assert list(found)[:2] == ["forward", "backward"] and list(found)[-1] == "other"
        assert one.total == pytest.approx(18e-3) and one.share("forward") == pytest.approx(4 / 18)


def test_ranks_that_hold_alike_are_told_once(tmp_path: Path) -> None:
    folder = fill(tmp_path / "run")
    dryrun = {"world": 4, "bubble": 0.1, "ranks": [{"rank": 2, "peak_by_kind": {"weights": 72}, "host_bytes": 9}]}
    (folder / contents.DRYRUN).write_text(json.dumps(dryrun))
    run = contents.read(folder)
    assert run.problems == []
    found = {one.name: one.sides for one in holdings(run)}
    assert list(found) == ["ranks 0-1", "rank 2", "rank 3"]
    assert found["ranks 0-1"]["planned"] == {"weights": 80, "gradients": 80, "optimizer": 160}
    assert found["ranks 0-1"]["measured"]["activations"] == 512 and "rehearsed" not in found["ranks 0-1"]
    assert found["rank 2"]["rehearsed"] == {"weights": 72, "host": 9}
    assert on_device(found["rank 2"]["rehearsed"]) == 72, "the host's is elsewhere"
    assert kinds_of(holdings(run)) == ["weights", "gradients", "optimizer", "activations", "host"]


def test_the_plan_says_which_part_a_rank_keeps() -> None:
    found = plan()
    assert found.part(Place(dp=1, tp=0, pp=0), "optimizer") == (2, 2)
    assert found.part(Place(dp=1, tp=0, pp=1), "weights") == (1, 1)
    assert found.held_bytes == HELD


def test_states_of_runs(tmp_path: Path) -> None:
    assert contents.read(fill(tmp_path / "done")).state == "done"
    short = fill(tmp_path / "short", done=False)
    (short / contents.LOCK).touch()
    assert contents.read(short).state == "cut short"
    fcntl = pytest.importorskip("fcntl", reason="where there are no locks a running run looks like one that was cut")
    with (short / contents.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert contents.read(short).state == "running"
    assert contents.read(short).state == "cut short"


@pytest.mark.parametrize("missing", [CONFIG, PLAN, METRICS, TRACE])
def test_a_missing_file_leaves_the_rest(tmp_path: Path, missing: str) -> None:
    folder = fill(tmp_path / "run")
    (folder / missing).unlink()
    run = contents.read(places.find(folder))
    told = " ".join(run.problems)
    assert (missing in told) == (missing != TRACE), "a trace is nobody's duty"
    assert facts(run, [])["layout"] == {"dp": 2, "tp": 1, "pp": 2}
    assert bool(run.metrics.steps) == (missing != METRICS) and bool(run.plan) == (missing != PLAN)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (CONFIG, "[run\n"),
        (CONFIG, "[run]\nnmae = 3\n"),
        (PLAN, "{}"),
        (PLAN, "{"),
        (TRACE, "{"),
        (contents.DRYRUN, '{"world": 4, "ranks": [{}]}'),
    ],
)
def test_a_broken_file_leaves_the_rest_and_is_told(tmp_path: Path, file: str, text: str) -> None:
    folder = fill(tmp_path / "run")
    (folder / file).write_text(text)
    run = contents.read(folder)
    assert len(run.problems) == 1 and file in run.problems[0] and len(run.metrics.steps) == 10


def test_a_plan_that_contradicts_itself_is_left_out(tmp_path: Path) -> None:
    folder = fill(tmp_path / "run")
    (folder / PLAN).write_text(json.dumps(json.loads(plan().model_dump_json()) | {"world": 8}))
    run = contents.read(folder)
    assert run.plan is None and len(run.problems) == 1 and PLAN in run.problems[0]


def test_without_a_trace_the_schedule_is_drawn_on_paper(tmp_path: Path) -> None:
    problems: list[str] = []
    paper = gantt(contents.read(fill(tmp_path / "run", traced=False)), problems)
    assert paper is not None and paper.title == "The schedule on paper" and not problems
    assert "bubble of 25.0%" in paper.told, "1F1B, p = 2, m = 4: (p - 1)/m"
    traced = gantt(contents.read(fill(tmp_path / "other")), problems)
    assert traced is not None and traced.title == "The schedule at mean times and the measured step" and not problems
    assert [row[0] for row in traced.table.rows] == [
        *("rank 0, at mean times", "rank 2, at mean times"),
        *("rank 0, measured", "rank 2, measured"),
    ]


def test_a_folder_that_is_no_run_is_refused_and_near_ones_are_named(tmp_path: Path) -> None:
    fill(tmp_path / "runs" / "demo", traced=False)
    fill(tmp_path / "runs" / "offload", traced=False)
    for wrong, near in (
        ("runs", "runs/demo"),
        ("runs/dmo", "runs/demo"),
        ("runs/offlod", "runs/offload"),
        ("runs/demo/metrics.jsonl", "runs/demo"),
        (".", "runs/demo"),
    ):
        with pytest.raises(UsageError) as caught:
            places.find(tmp_path / wrong)
        assert caught.value.hint.startswith(f"Did you mean {tmp_path / near}"), wrong
        assert caught.value.exit_code == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty is not the folder of a run: it has no metrics\.jsonl"):
        places.find(tmp_path / "empty")
