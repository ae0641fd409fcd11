"""The manifest: what it says is read back alike, and what cannot be is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero3d.checkpoint.manifest import (
    Entry,
    File,
    Manifest,
    Number,
    Piece,
    Scaling,
    Sizes,
    Slice,
    _checksum,
    dump,
    parse,
)
from zero3d.errors import DataError

WHERE = Path("step-00000003/manifest.json")


def made() -> Manifest:
    """A matrix cut in halves, one of them in two files, and a bias."""
    halves = [
        Slice(
            ranges=[(0, 2)],
            padding=0,
            pieces=[
                Piece(file=0, key="w[0:4]", offset=64, begin=0, numel=4),
                Piece(file=1, key="w[4:6]", offset=64, begin=4, numel=2),
            ],
        ),
        Slice(ranges=[(2, 3)], padding=1, pieces=[Piece(file=1, key="w[0:6]", offset=72, begin=0, numel=6)]),
    ]
    bias = Slice(ranges=[], padding=0, pieces=[Piece(file=0, key="b", offset=80, begin=0, numel=1)])
    files = [File(name=f"rank-0000{rank}.safetensors", size=104, table=100, checksum=7) for rank in range(2)]
    return Manifest(
        step=3,
        what="all",
        layout=Sizes(dp=1, tp=2, pp=1),
        learning_rate=1e-3,
        scaler=Scaling(enabled=True, scale=2.0**-70, bad_steps=1, good_steps=0, started=True),
        config={"run": {"seed": 1}},
        extra={"tokens": 2**60, "rate": 0.1, "none": None},
        numbers={"w": {"step": Number(dtype="F32", value=3.0), "flag": Number(dtype=None, value=None)}},
        tensors=[
            Entry(kind="weight", name="w", shape=[3, 3], dtype="F32", trainable=True, ties=["v"], dim=0, parts=halves),
            Entry(kind="state", name="b", key="momentum", shape=[], dtype="BF16", parts=[bias]),
            Entry(kind="buffer", name="none", shape=[0, 4], dtype="BOOL", parts=[]),
        ],
        files=files,
    )


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """The manifest's text with a `change`, signed again."""
    tree = json.loads(dump(made()))
    change(tree)
    del tree["checksum"]
    return json.dumps({"checksum": _checksum(tree), **tree})


def test_what_was_written_is_read() -> None:
    assert parse(dump(made()), WHERE) == made()


def test_another_version_says_so() -> None:
    with pytest.raises(DataError, match="format 2"):
        parse(changed(lambda tree: tree.update(format=2)), WHERE)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_changed_character_is_refused(data: st.DataObject) -> None:
    text = dump(made())
    at = data.draw(st.integers(0, len(text) - 1))
    other = text[:at] + data.draw(st.characters(codec="ascii")) + text[at + data.draw(st.integers(0, 2)) :]
    try:
        read = parse(other, WHERE)
    except DataError as error:
        assert error.hint and error.where
    else:  # Spaces between words of JSON, or nothing changed.
        assert read == made()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"format": NaN}', "[" * 100_000, "9" * 5000])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        parse(text, WHERE)


def first(tree: dict[str, Any], *path: Any) -> Any:
    for one in path:
        tree = tree[one]
    return tree


PIECES = ("tensors", 0, "parts", 0, "pieces")
NUMBER = ("numbers", "w", "step")
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no file name": lambda tree: tree["files"][0].update(name="../rank-00000.safetensors"),
    "an absolute path": lambda tree: tree["files"][0].update(name="/etc/passwd"),
    "the parent": lambda tree: tree["files"][0].update(name=".."),
    "the same file": lambda tree: tree["files"][0].update(name="rank-00001.safetensors"),
    "a file that is not there": lambda tree: first(tree, *PIECES, 0).update(file=2),
    "outside its file": lambda tree: first(tree, *PIECES, 0).update(offset=92),
    "half an element": lambda tree: first(tree, *PIECES, 0).update(offset=62),
    "before the file": lambda tree: first(tree, *PIECES, 0).update(offset=-4),
    "a gap": lambda tree: first(tree, *PIECES, 1).update(begin=5, numel=1),
    "an overlap": lambda tree: first(tree, *PIECES, 1).update(begin=3, numel=3),
    "too many": lambda tree: first(tree, *PIECES, 1).update(numel=3),
    "a missing piece": lambda tree: first(tree, *PIECES).pop(),
    "a missing part": lambda tree: first(tree, "tensors", 0, "parts").pop(),
    "other ranges": lambda tree: first(tree, "tensors", 0, "parts", 0).update(ranges=[[0, 1]]),
    "no such dim": lambda tree: first(tree, "tensors", 0).update(dim=2),
    "another shape": lambda tree: first(tree, "tensors", 0).update(shape=[3, 4]),
    "a huge shape": lambda tree: first(tree, "tensors", 0).update(shape=[3, 2**62]),
    "another dtype": lambda tree: first(tree, "tensors", 0).update(dtype="C64"),
    "a number of no dtype": lambda tree: first(tree, *NUMBER).update(dtype="F31"),
    "a text for a number": lambda tree: first(tree, *NUMBER).update(value="three"),
    "too large a number": lambda tree: first(tree, *NUMBER).update(value=1e300),
    "half an integer": lambda tree: first(tree, *NUMBER).update(dtype="I64", value=0.5),
    "too large an integer": lambda tree: first(tree, *NUMBER).update(dtype="U8", value=256),
    "a negative count": lambda tree: first(tree, *NUMBER).update(dtype="U8", value=-1),
    "too large, without elements": lambda tree: first(tree, "tensors", 2).update(shape=[0, 2**61]),
    "an endless step": lambda tree: tree.update(step=10**30),
    "updates that are none": lambda tree: tree.update(extra={"updates": "many"}),
    "no number": lambda tree: tree.update(step=True),
    "an unknown key": lambda tree: tree.update(more=1),
    "twice": lambda tree: tree["tensors"].append(tree["tensors"][0]),
    "a table outside": lambda tree: tree["files"][0].update(table=200),
    "no table": lambda tree: tree["files"][0].update(table=0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_is_refused_however_well_it_is_signed(name: str) -> None:
    with pytest.raises(DataError):
        parse(changed(CHANGES[name]), WHERE)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("F16", 65504.0), ("F32", "nan"), ("F64", "-inf"), ("I8", -128), ("U64", 2**64 - 1), ("BOOL", True), (None, "x")],
)
def test_numbers_that_a_tensor_can_have_are_read(dtype: str | None, value: object) -> None:
    text = changed(lambda tree: first(tree, *NUMBER).update(dtype=dtype, value=value))
    assert parse(text, WHERE).numbers["w"]["step"] == Number(dtype=dtype, value=value)  # type: ignore[arg-type]


def test_what_json_has_no_word_for_is_no_manifest() -> None:
    with pytest.raises(ValueError):
        dump(made().model_copy(update={"learning_rate": float("nan")}))
