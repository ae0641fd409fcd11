"""Folders of checkpoints: which is the newest whole one, what is kept, and what a killed save leaves."""

import os
from pathlib import Path

import pytest

from tests.pure.test_checkpoint_manifest import made
from zero3d.checkpoint import folders, local
from zero3d.checkpoint.manifest import MANIFEST, dump
from zero3d.errors import DataError, UsageError


def put(folder: Path, name: str) -> Path:
    """A whole checkpoint, as far as folders can tell."""
    path = folder / name
    path.mkdir(parents=True)
    manifest = made()
    (path / MANIFEST).write_text(dump(manifest))
    for one in manifest.files:
        (path / one.name).write_bytes(bytes(one.size))
    return path


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_the_newest_whole_one_is_found_and_others_are_told(tmp_path: Path) -> None:
    for step in (5, 20, 100, 1_000_000_000):
        put(tmp_path, folders.name_of(step))
    put(tmp_path, "step-00000300.tmp-12ab")
    (tmp_path / "step-00000200").mkdir()
    (tmp_path / "step-1000000000" / "rank-00001.safetensors").unlink()
    with open(tmp_path / "step-00000100" / "rank-00000.safetensors", "ab") as file:
        file.write(b"more")
    (tmp_path / "step-00000400").write_text("no folder")
    (tmp_path / "best").mkdir()
    found = folders.newest(tmp_path)
    assert found.path.name == "step-00000020"
    assert [one.partition(":")[0] for one in found.skipped] == ["step-1000000000", "step-00000200", "step-00000100"]
    assert "108 bytes, where 104 were written" in found.skipped[2]


def test_one_checkpoint_is_taken_by_its_own_name(tmp_path: Path) -> None:
    path = put(tmp_path, "step-00000005")
    assert folders.newest(path).path == path
    assert folders.newest(put(tmp_path, "best")).path == tmp_path / "best"


def test_where_there_is_none_the_error_says_what_was_looked_at(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no checkpoint is in this folder"):
        folders.newest(tmp_path)
    (tmp_path / "step-00000007").mkdir()
    with pytest.raises(DataError, match="step-00000007: no manifest"):
        folders.newest(tmp_path)
    with pytest.raises(DataError, match="no checkpoints"):
        folders.newest(tmp_path / "missing")


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    """They could lead out of the folder."""
    path = put(tmp_path / "run", "step-00000005")
    (path / name).rename(tmp_path / name)
    (path / name).symlink_to(tmp_path / name)
    with pytest.raises(DataError, match="link"):
        folders.newest(tmp_path / "run")


def test_keep_removes_older_ones_and_never_for_what_is_not_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5, 6):
        put(tmp_path, folders.name_of(step))
    (tmp_path / "step-00000006" / MANIFEST).unlink()
    removed = folders.keep(tmp_path, last=2, every=3)
    assert [one.name for one in removed] == ["step-00000002", "step-00000001"]
    assert names(tmp_path) == [folders.name_of(step) for step in (3, 4, 5, 6)]
    with pytest.raises(UsageError):
        folders.keep(tmp_path, last=0)


def test_one_of_the_same_step_gives_way(tmp_path: Path) -> None:
    put(tmp_path, "step-00000005")
    new = put(tmp_path, "step-00000005.tmp-1f")
    (new / "mark").touch()
    local.publish(new, tmp_path / "step-00000005")
    assert names(tmp_path) == ["step-00000005"]
    assert (tmp_path / "step-00000005" / "mark").exists()


def test_killed_between_two_renames_the_old_one_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "step-00000005")
    new = put(tmp_path, "step-00000005.tmp-1f")
    real = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self == new:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        local.publish(new, tmp_path / "step-00000005")
    assert folders.newest(tmp_path).path.name.startswith("step-00000005.old-")


def test_leftovers_are_what_no_run_needs(tmp_path: Path) -> None:
    put(tmp_path, "step-00000005")
    put(tmp_path, "step-00000004.old-aa")
    for name in ("step-00000005.old-aa", "step-00000006.tmp-aa", "step-00000007.tmp-bb", "mine.tmp-aa"):
        (tmp_path / name).mkdir()
    os.symlink(tmp_path, tmp_path / "step-00000008.tmp-cc")
    found = local.leftovers(tmp_path, tmp_path / "step-00000007.tmp-bb")
    assert sorted(one.name for one in found) == ["step-00000005.old-aa", "step-00000006.tmp-aa"]
