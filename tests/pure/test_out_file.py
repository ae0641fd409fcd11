"""`--out` of all verbs: what cannot be written is known before the work, and nothing is left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zero3d.cli import calibrate, dryrun, plan, report
from zero3d.cli.main import app
from zero3d.cli.out_file import check_out, write_out
from zero3d.errors import UsageError

LONG = "x" * 300


def broken(folder: Path, suffix: str) -> Iterator[Path]:
    """Where no file can be written."""
    link = folder / f"link{suffix}"
    link.symlink_to(folder / "gone" / f"x{suffix}")
    is_folder = folder / f"folder{suffix}"
    is_folder.mkdir()
    yield from (folder / "none" / f"x{suffix}", is_folder, link, folder / f"{LONG}{suffix}", Path(f"/proc/x{suffix}"))


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("the work began")


@pytest.mark.parametrize(
    ("suffix", "module", "work", "words"),
    [
        (".json", dryrun, "_rehearsed", ["dryrun", "examples/demo.toml"]),
        (".toml", plan, "planned", ["plan", "--model", "gpt2", "--devices", "2", "--device", "H100"]),
        (".json", calibrate, "check_memory", ["calibrate", "-n", "1"]),
        (".html", report, "_plotly", ["report", "RUN"]),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    module: object,
    work: str,
    words: list[str],
) -> None:
    monkeypatch.setattr(module, work, never)
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    for out in broken(tmp_path, suffix):
        before = sorted(tmp_path.iterdir())
        given = [str(run) if word == "RUN" else word for word in words]
        done = CliRunner().invoke(app, [*given, "--out", str(out)])
        assert done.exit_code == 2, (out, done.output, done.exception)
        assert "cannot be written" in done.stderr and "a folder that is there" in done.stderr
        assert sorted(tmp_path.iterdir()) == before


def test_a_link_leads_to_the_file_that_is_written(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    check_out(link)
    assert file.read_text() == "old"
    write_out(link, "new")
    assert link.is_symlink() and file.read_text() == "new"
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_a_device_is_not_replaced() -> None:
    with pytest.raises(UsageError, match="no plain file"):
        check_out(Path("/dev/null"))
