"""Sources: which files, in which order, and what is refused."""

import os
import socket
from pathlib import Path

import pytest

from zero3d.data.sources import STDLIB, Document, documents, list_files, read
from zero3d.errors import DataError


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_a_folder_is_read_recursively_in_the_order_of_relative_paths(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": b"two", "a/z.md": b"one", "c": "drei äöü".encode()})
    assert list(documents(str(tmp_path))) == [
        Document("a/z.md", b"one"),
        Document("b.txt", b"two"),
        Document("c", "drei äöü".encode()),
    ]


def test_files_that_are_not_text_are_named_and_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"text", "latin": "ä".encode("latin-1"), "zeros": b"a\0b", "empty": b""})
    skipped: list[str] = []
    assert [document.name for document in documents(str(tmp_path), skipped.append)] == ["a"]
    assert skipped == ["latin", "zeros"]


def test_hidden_files_and_folders_are_no_part_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"text", ".git/config": b"text", ".hidden": b"text"})
    assert [file.name for file in list_files(str(tmp_path)).files] == ["a"]


def test_what_is_not_a_file_in_a_folder_is_not_opened(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"text"})
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    assert [document.name for document in documents(str(tmp_path))] == ["a"]


def test_a_file_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": b"text"}) / "a.txt"
    assert list(documents(str(path))) == [Document("a.txt", b"text")]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(write(tmp_path, {"a.txt": b"text"})))
    assert list(documents("~/a.txt")) == [Document("a.txt", b"text")]


def test_the_standard_library_is_its_own_python_files_alone() -> None:
    listing = list_files(STDLIB)
    names = [file.name for file in listing.files]
    assert names == sorted(names) and len(names) > 300 and listing.size > 3_000_000
    assert {"dataclasses.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    assert not any({"site-packages", "dist-packages", "__pycache__"} & set(Path(name).parts) for name in names)


def test_listing_knows_sizes_and_times(tmp_path: Path) -> None:
    listing = list_files(str(write(tmp_path, {"a": b"12", "b": b"345"})))
    assert listing.size == 5
    assert listing.files[0].modified == (tmp_path / "a").stat().st_mtime_ns


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "nowhere", "nowhere does not exist"),
        ({}, "", "holds no text file"),
        ({"a.txt": b""}, "a.txt", "a.txt is empty"),
        ({"a.bin": b"\xff\xfe"}, "a.bin", "a.bin is not UTF-8 text"),
        ({"a": b"\0", "b": b"\xff", "c": b""}, "", "holds no text: of its 3 files 2 are not UTF-8 text"),
    ],
)
def test_refusals(tmp_path: Path, files: dict[str, bytes], source: str, message: str) -> None:
    write(tmp_path, files)
    with pytest.raises(DataError) as caught:
        list(documents(str(tmp_path / source)))
    assert message in caught.value.message
    assert caught.value.where == "data.source"
    assert caught.value.hint and caught.value.exit_code == 2


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        with pytest.raises(DataError, match="s is neither a file nor a folder"):
            list_files("s")


def test_a_file_that_vanishes_after_it_was_listed(tmp_path: Path) -> None:
    listing = list_files(str(write(tmp_path, {"a": b"text", "b": b"text"})))
    (tmp_path / "b").unlink()
    with pytest.raises(DataError, match=r"b cannot be read: No such file") as caught:
        list(read(listing))
    assert "still exists" in caught.value.hint


def test_a_file_that_became_a_folder_cannot_be_read(tmp_path: Path) -> None:
    listing = list_files(str(write(tmp_path, {"a": b"text"})))
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=r"a cannot be read: Is a directory"):
        list(read(listing))
