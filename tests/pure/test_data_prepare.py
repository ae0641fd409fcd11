"""From a configuration to train and heldout tokens: the split, reuse, repair, and what is refused."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zero3d.data.prepare as module
from zero3d.config import Data
from zero3d.data.prepare import Prepared, heldout_part, prepare
from zero3d.data.sources import STDLIB
from zero3d.data.tokens import TokenFile
from zero3d.errors import DataError

LINES = "".join(f"line {number} äöü\n" for number in range(200)).encode()


def config(source: Path | str, sequence_length: int = 4, tokenizer: str = "bytes") -> Data:
    return Data(source=str(source), sequence_length=sequence_length, tokenizer=tokenizer)


def one_file(tmp_path: Path, content: bytes = LINES) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return path


def many_files(tmp_path: Path, number: int) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(number):
        (folder / f"{index:03}.txt").write_bytes(f"document {index:03}\n".encode())
    return folder


def bins(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.bin"))


def test_of_one_document_the_last_twentieth_is_held_out(tmp_path: Path) -> None:
    made = prepare(config(one_file(tmp_path)), tmp_path / "out")
    assert made.train.tobytes() + made.heldout.tobytes() == LINES
    # A character is not cut in two, so up to 3 bytes more may be held out.
    assert 0 <= len(made.heldout) - len(LINES) // 20 <= 3
    assert made.heldout.tobytes().decode()
    assert (made.train_bytes, made.heldout_bytes) == (len(made.train), len(made.heldout))
    assert (made.documents, made.skipped, made.vocabulary, made.tokenizer) == (1, 0, 256, "bytes")


def test_of_a_short_document_one_sequence_is_held_out(tmp_path: Path) -> None:
    made = prepare(config(one_file(tmp_path, b"abcdefghijklm"), sequence_length=5), tmp_path / "out")
    assert (made.train.tobytes(), made.heldout.tobytes()) == (b"abcdefg", b"hijklm")


@given(whole=st.integers(0, 10**9), sequence_length=st.integers(1, 10**5))
def test_the_part_held_out(whole: int, sequence_length: int) -> None:
    part = heldout_part(whole, sequence_length)
    assert part >= sequence_length + 1 and part >= whole // 20
    assert part in (sequence_length + 1, whole // 20)


def test_of_many_documents_every_twentieth_is_held_out(tmp_path: Path) -> None:
    made = prepare(config(many_files(tmp_path, 45)), tmp_path / "out")
    assert made.heldout.tobytes() == b"document 000\ndocument 020\ndocument 040\n"
    train = made.train.tobytes().decode().splitlines()
    assert train == [f"document {index:03}" for index in range(45) if index % 20]
    assert made.documents == 45


def test_few_documents_are_cut_by_position(tmp_path: Path) -> None:
    """A large one among two was held out, and a run trained on the other's few bytes."""
    source = many_files(tmp_path, 2)
    (source / "000.txt").write_bytes(LINES)
    made = prepare(config(source), tmp_path / "out")
    assert made.train.tobytes() + made.heldout.tobytes() == LINES + b"document 001\n"
    assert len(made.heldout) < 0.2 * len(made.train)
    assert made.documents == 2


def test_what_was_made_is_found_by_its_name(tmp_path: Path) -> None:
    source = many_files(tmp_path, 3)
    made = prepare(config(source), tmp_path / "out")
    (source / "004.txt").write_bytes(LINES)
    again = prepare(config(source), tmp_path / "out", name=made.name)
    assert again.train.tobytes() == made.train.tobytes() and again.reused
    with pytest.raises(DataError, match="are gone"):
        prepare(config(source), tmp_path / "other", name=made.name)


def test_a_folder_with_one_text_is_split_like_a_file(tmp_path: Path) -> None:
    folder = many_files(tmp_path, 1)
    (folder / "000.txt").write_bytes(LINES)
    (folder / "image.png").write_bytes(b"\x89PNG\0")
    made = prepare(config(folder), tmp_path / "out")
    assert made.train.tobytes() + made.heldout.tobytes() == LINES
    assert (made.documents, made.skipped) == (1, 1)


def test_prepared_files_are_reused_untouched(tmp_path: Path) -> None:
    data, out = config(many_files(tmp_path, 3)), tmp_path / "out"
    first = prepare(data, out)
    times = [path.stat().st_mtime_ns for path in bins(out)]
    again = prepare(data, out)
    assert (first.reused, again.reused) == (False, True)
    assert [path.stat().st_mtime_ns for path in bins(out)] == times
    assert again.train.tobytes() == first.train.tobytes()
    assert (again.documents, again.skipped, again.train_bytes) == (3, 0, first.train_bytes)


@pytest.mark.parametrize("which", ["train", "heldout"])
@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "no sidecar", "bad sidecar", "no file"])
def test_damaged_files_are_made_again(tmp_path: Path, which: str, damage: str) -> None:
    data, out = config(many_files(tmp_path, 3)), tmp_path / "out"
    first = prepare(data, out)
    contents = (first.train.tobytes(), first.heldout.tobytes())
    del first
    path = next(out.glob(f"{which}-*.bin"))
    sidecar = Path(f"{path}.json")
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[:-1])
    elif damage == "changed":
        path.write_bytes(b"X" + whole[1:])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no sidecar":
        sidecar.unlink()
    elif damage == "bad sidecar":
        sidecar.write_text("{")
    else:
        path.unlink()
    again = prepare(data, out)
    assert not again.reused
    assert (again.train.tobytes(), again.heldout.tobytes()) == contents
    assert prepare(data, out).reused
    assert not list(out.glob("*.part"))


def test_files_of_a_changed_source_are_not_reused(tmp_path: Path) -> None:
    source, out = many_files(tmp_path, 3), tmp_path / "out"
    data = config(source)
    prepare(data, out)

    (source / "001.txt").write_bytes(b"longer document\n")  # another size
    assert b"longer document" in prepare(data, out).train.tobytes()

    facts = (source / "001.txt").stat()
    (source / "001.txt").write_bytes(b"Longer document\n")  # the same size, another time
    os.utime(source / "001.txt", ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    made = prepare(data, out)
    assert not made.reused and b"Longer document" in made.train.tobytes()

    (source / "001.txt").rename(source / "001b.txt")  # another name
    assert not prepare(data, out).reused
    assert not prepare(config(source, sequence_length=5), out).reused
    assert prepare(data, out).reused


def test_another_folder_of_equal_files_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for source in (many_files(tmp_path, 3), many_files(tmp_path / "other", 3)):
        for path in source.iterdir():
            os.utime(path, ns=(0, 0))
        assert not prepare(config(source), tmp_path / "out").reused


def test_callers_at_the_same_time_all_get_whole_files(tmp_path: Path) -> None:
    data, out = config(many_files(tmp_path, 60)), tmp_path / "out"

    def contents(_: int) -> tuple[bytes, bytes]:
        made = prepare(data, out)
        return made.train.tobytes(), made.heldout.tobytes()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(contents, range(16)))
    assert len(set(results)) == 1
    assert len(bins(out)) == 2 and len(list(out.iterdir())) == 4
    for path in bins(out):
        TokenFile.open(path).check()


def test_a_token_file_is_cut_without_copying(tmp_path: Path) -> None:
    prepare(config(one_file(tmp_path)), tmp_path / "out")
    path = next((tmp_path / "out").glob("train-*.bin"))
    before = sorted(tmp_path.rglob("*"))
    made = prepare(config(path), tmp_path / "out")
    whole = TokenFile.open(path).ids
    assert sorted(tmp_path.rglob("*")) == before
    assert isinstance(made.train, np.memmap) and isinstance(made.heldout, np.memmap)
    assert len(made.heldout) == len(whole) // 20
    assert made.train.tobytes() + made.heldout.tobytes() == whole.tobytes()
    assert (made.heldout_bytes, made.reused) == (len(made.heldout), True)


def test_a_token_file_of_another_tokenizer_is_refused(tmp_path: Path, tokenizer_json: Path) -> None:
    prepare(config(one_file(tmp_path)), tmp_path / "out")
    path = next((tmp_path / "out").glob("train-*.bin"))
    with pytest.raises(DataError, match=r"was made by tokenizer bytes, and data\.tokenizer is words"):
        prepare(config(path, tokenizer=str(tokenizer_json)), tmp_path / "out")


def test_a_cut_token_file_is_refused(tmp_path: Path) -> None:
    prepare(config(one_file(tmp_path)), tmp_path / "out")
    path = next((tmp_path / "out").glob("train-*.bin"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="was cut off or changed"):
        prepare(config(path), tmp_path / "out")


def test_a_text_with_some_json_next_to_it_is_a_text(tmp_path: Path) -> None:
    source = one_file(tmp_path)
    (tmp_path / "text.txt.json").write_text('{"title": "Lines"}')
    assert prepare(config(source), tmp_path / "out").documents == 1


def test_the_folder_we_are_in_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(many_files(tmp_path, 3))
    assert prepare(config("."), tmp_path / "out").documents == 3


def test_a_binary_file_without_sidecar_is_no_token_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(100))
    with pytest.raises(DataError, match="not UTF-8 text"):
        prepare(config(path), tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "counts"),
    [
        (b"abcdefghi", "9 tokens: 4 to train on and 5 held out"),
        (b"abc", "3 tokens: 0 to train on and 3 held"),
    ],
)
def test_too_little_text_is_refused_with_the_numbers(tmp_path: Path, content: bytes, counts: str) -> None:
    with pytest.raises(DataError) as caught:
        prepare(config(one_file(tmp_path, content)), tmp_path / "out")
    assert counts in caught.value.message
    assert "a sequence of 4 needs 5 in each" in caught.value.message
    assert caught.value.hint == "Give more text, or a smaller data.sequence_length."
    assert not list((tmp_path / "out").iterdir())


def test_too_small_a_heldout_document_is_refused(tmp_path: Path) -> None:
    source = many_files(tmp_path, 20)
    (source / "000.txt").write_bytes(b"tiny")
    with pytest.raises(DataError, match="247 to train on and 4 held out"):
        prepare(config(source), tmp_path / "out")


def test_too_short_a_token_file_is_refused(tmp_path: Path) -> None:
    prepare(config(one_file(tmp_path, b"abcdefghij")), tmp_path / "out")
    path = next((tmp_path / "out").glob("train-*.bin"))
    with pytest.raises(DataError, match="5 tokens: 0 to train on and 5 held out"):
        prepare(config(path), tmp_path / "out")


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    """One token a word; hundreds of ids, so two bytes a token."""
    import tokenizers

    words = {"line": 0, "äöü": 1, "[UNK]": 2} | {str(number): 100 + number for number in range(200)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def test_a_json_tokenizer_counts_tokens_and_bytes_of_each_part(tmp_path: Path, tokenizer_json: Path) -> None:
    made: Prepared = prepare(config(one_file(tmp_path), 100, str(tokenizer_json)), tmp_path / "out")
    assert made.vocabulary == 300 and made.train.dtype == np.uint16
    # The last twentieth has some 30 words; the part is doubled until it holds a sequence.
    assert 101 <= len(made.heldout) < len(made.train)
    assert len(made.train) + len(made.heldout) in (600, 601)  # the cut may part a word in two
    assert made.train_bytes and made.heldout_bytes and made.train_bytes + made.heldout_bytes == len(LINES)


def test_progress_is_told_only_for_long_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []

    def tell(text: str, part: float) -> None:
        told.append((text, part))

    source = many_files(tmp_path, 20)
    prepare(config(source), tmp_path / "short", tell)
    assert told == []
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)
    prepare(config(source), tmp_path / "long", tell)
    assert told[0] == (f"tokenizing {source}", pytest.approx(1 / 20)) and told[-1][1] == 1.0
    prepare(config(source), tmp_path / "long", tell)
    assert told[-1][1] == 1.0 and len(told) == 2


def test_the_standard_library_is_prepared(tmp_path: Path) -> None:
    made = prepare(config(STDLIB, 256), tmp_path)
    assert 0.01 < len(made.heldout) / len(made.train) < 0.2
    assert b"def " in made.heldout[:100_000].tobytes()
    assert made.documents > 300
