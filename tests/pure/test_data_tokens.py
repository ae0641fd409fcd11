"""Token files: what is written is read; what is damaged, odd or half written is refused."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero3d.data.tokens import TokenFile, TokenWriter, dtype_for, is_token_file, sidecar_of
from zero3d.errors import DataError, OutOfSpaceError


def save(path: Path, ids: list[int], vocabulary: int = 256) -> Path:
    with TokenWriter(path, vocabulary=vocabulary, tokenizer="bytes", source="here") as writer:
        writer.documents = 1
        writer.add(np.asarray(ids, dtype=np.uint64), text_bytes=len(ids))
    return path


def edit(path: Path, **changes: Any) -> None:
    sidecar = sidecar_of(path)
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | changes))


@settings(deadline=None, max_examples=30)
@given(data=st.data(), vocabulary=st.sampled_from([2, 256, 257, 65536, 65537, 2**32]))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, vocabulary: int) -> None:
    ids = data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=20))
    path = save(tmp_path_factory.mktemp("tokens") / "a.bin", ids, vocabulary)
    file = TokenFile.open(path)
    file.check()
    assert file.ids.tolist() == ids
    assert file.ids.dtype == dtype_for(vocabulary)
    assert (file.header.tokens, file.header.text_bytes, file.header.documents) == (len(ids), len(ids), 1)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_the_smallest_dtype_that_holds_the_vocabulary(vocabulary: int, dtype: str) -> None:
    assert dtype_for(vocabulary) == dtype


def test_ids_are_little_endian_and_nothing_else(tmp_path: Path) -> None:
    assert save(tmp_path / "a.bin", [1, 256], 300).read_bytes() == b"\x01\x00\x00\x01"


def test_ids_are_mapped_read_only(tmp_path: Path) -> None:
    ids = TokenFile.open(save(tmp_path / "a.bin", [1, 2])).ids
    assert isinstance(ids, np.memmap) and not ids.flags.writeable


def test_sidecar_is_plain_json(tmp_path: Path) -> None:
    path = save(tmp_path / "a.bin", [1, 2, 3])
    facts = json.loads((tmp_path / "a.bin.json").read_text())
    assert is_token_file(path) and not is_token_file(tmp_path / "b.bin")
    assert facts["format"] == 1 and facts["tokens"] == 3 and facts["tokenizer"] == "bytes"


def test_an_interrupted_writer_leaves_what_was_there(tmp_path: Path) -> None:
    path = save(tmp_path / "a.bin", [1, 2])
    writer = TokenWriter(path, vocabulary=256, tokenizer="bytes", source="here")
    with pytest.raises(KeyboardInterrupt), writer:
        writer.add(np.asarray([3], dtype=np.uint8), 1)
        raise KeyboardInterrupt
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.bin", "a.bin.json"]
    TokenFile.open(path).check()


def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token 300 in a vocabulary of 299"):
        save(tmp_path / "a.bin", [1, 300], 299)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "version 1: format"),
        ({"dtype": "float32"}, "version 1: dtype"),
        ({"dtype": "uint32"}, "dtype uint32 for a vocabulary of 256, which takes uint8"),
        ({"tokens": 4}, "3 bytes, where 4 tokens of 1 bytes make 4"),
        ({"tokens": "3"}, "version 1: tokens"),
        ({"vocabulary": 0}, "version 1: vocabulary"),
        ({"surprise": 0}, "version 1: surprise"),
    ],
)
def test_a_sidecar_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "a.bin", [1, 2, 3])
    edit(path, **changes)
    with pytest.raises(DataError) as caught:
        TokenFile.open(path)
    assert message in caught.value.message and "a.bin" in caught.value.where and caught.value.hint


def test_damaged_pairs_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.bin", [1, 2, 3])
    path.write_bytes(b"\1\2")
    with pytest.raises(DataError, match="was cut off or changed"):
        TokenFile.open(path)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        TokenFile.open(path)
    sidecar_of(path).write_text('{"format": 1')
    with pytest.raises(DataError, match="JSON: Invalid JSON"):
        TokenFile.open(path)
    sidecar_of(path).unlink()
    with pytest.raises(DataError, match=r"no sidecar a\.bin\.json") as caught:
        TokenFile.open(path)
    assert "keep them together" in caught.value.hint


def test_changed_contents_are_found_by_check(tmp_path: Path) -> None:
    path = save(tmp_path / "a.bin", [1, 2, 3])
    path.write_bytes(b"\1\2\4")
    file = TokenFile.open(path)
    with pytest.raises(DataError, match="contents differ from their checksum"):
        file.check()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be written") as caught:
        save(tmp_path / "file" / "a.bin", [1])
    assert "Choose a folder" in caught.value.hint


def test_a_full_disk_is_out_of_space(tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None: ...

    writer: Any = TokenWriter(tmp_path / "a.bin", vocabulary=256, tokenizer="bytes", source="here")
    with pytest.raises(OutOfSpaceError, match="No space left") as caught, writer:
        writer._file.close()
        writer._file = Full()
        writer.add(np.zeros(1, dtype=np.uint8), 1)
    assert caught.value.exit_code == 3 and not list(tmp_path.iterdir())
