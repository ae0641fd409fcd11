"""Tokenizers: round trips, whole texts, and what is refused."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hugging_face
from hypothesis import given, settings
from hypothesis import strategies as st

from zero3d.data.tokenizers import JsonTokenizer, character_start, pieces, tokenizer_for
from zero3d.errors import DataError

TEXT = "the cat sat on the mat; die Katze saß auf der Matte äöü 猫\n" * 20
CHARACTERS = "ab \n\t\0äß\u0301猫\u200d😀\U0010ffff"


@pytest.fixture(scope="module")
def json_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 280 ids, whose file asks for truncation, padding and a start token."""
    inner = hugging_face.Tokenizer(hugging_face.models.BPE())
    inner.pre_tokenizer = hugging_face.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = hugging_face.decoders.ByteLevel()
    trainer = hugging_face.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<s>"],
        initial_alphabet=hugging_face.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    inner.post_processor = hugging_face.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.enable_truncation(8)
    inner.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return path


@given(st.text(alphabet=CHARACTERS, max_size=50))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = tokenizer_for("bytes")
    ids = tokenizer.encode(text.encode())
    assert ids.dtype == np.uint8 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.name, tokenizer.vocabulary) == ("bytes", 256)


def test_bytes_that_are_not_text_decode_with_replacement() -> None:
    assert tokenizer_for("bytes").decode([104, 105, 255, 33]) == "hi\ufffd!"


@settings(deadline=None, max_examples=30)
@given(text=st.text(alphabet=CHARACTERS, max_size=50))
def test_json_round_trip(json_file: Path, text: str) -> None:
    tokenizer = tokenizer_for(str(json_file))
    assert tokenizer.decode(tokenizer.encode(text.encode())) == text


def test_json_encodes_the_whole_text_without_special_tokens(json_file: Path) -> None:
    tokenizer = JsonTokenizer(json_file)
    ids = tokenizer.encode(TEXT.encode())
    # The file asks for 8 tokens at most and a start token; a text to train on is neither cut nor framed.
    assert 8 < len(ids) < len(TEXT.encode()) and 0 not in ids
    assert len(tokenizer.encode(b"the")) < 8
    assert int(ids.max()) < tokenizer.vocabulary == 280
    assert tokenizer.encode(b"").tolist() == []


def test_json_text_of_many_pieces_comes_back_whole(json_file: Path) -> None:
    text = "the cat 猫\n" * 12_000
    tokenizer = JsonTokenizer(json_file)
    assert tokenizer.decode(tokenizer.encode(text.encode())) == text


def test_the_vocabulary_counts_gaps_between_ids(tmp_path: Path) -> None:
    path = tmp_path / "gaps.json"
    hugging_face.Tokenizer(hugging_face.models.WordLevel({"a": 0, "b": 999}, unk_token="a")).save(str(path))
    assert JsonTokenizer(path).vocabulary == 1000


def test_the_name_follows_the_contents(json_file: Path, tmp_path: Path) -> None:
    same = tmp_path / "tokenizer.json"
    same.write_bytes(json_file.read_bytes())
    assert JsonTokenizer(same).name == JsonTokenizer(json_file).name
    changed = json.loads(json_file.read_text())
    changed["truncation"] = None
    same.write_text(json.dumps(changed))
    assert JsonTokenizer(same).name != JsonTokenizer(json_file).name


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(DataError, match="byte cannot be read: No such file") as caught:
        tokenizer_for("byte")
    assert 'Give "bytes"' in caught.value.hint and caught.value.where == "data.tokenizer"


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    for content in (b"{}", b"\xff", b"not json"):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(DataError, match=r"t\.json is not a Hugging Face tokenizer"):
            JsonTokenizer(tmp_path / "t.json")


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    hugging_face.Tokenizer(hugging_face.models.BPE()).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match="empty vocabulary"):
        JsonTokenizer(tmp_path / "t.json")


def test_a_missing_package_is_named_with_the_command(json_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="needs the package tokenizers") as caught:
        JsonTokenizer(json_file)
    assert 'pip install "tokenizers' in caught.value.hint


@given(text=st.text(alphabet=CHARACTERS, max_size=60), at_most=st.integers(4, 20))
def test_pieces_are_text_of_bounded_size(text: str, at_most: int) -> None:
    cut = list(pieces(text.encode(), at_most))
    assert b"".join(cut) == text.encode()
    assert all(0 < len(piece) <= at_most and piece.decode() for piece in cut)


def test_pieces_end_after_a_line() -> None:
    assert list(pieces(b"ab\ncd\nefghij", 5)) == [b"ab\n", b"cd\n", b"efghi", b"j"]


def test_character_start() -> None:
    text = "a猫b".encode()
    assert [character_start(text, position) for position in range(6)] == [0, 1, 1, 1, 4, 5]
