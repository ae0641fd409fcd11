"""Byte models: values worked out by hand, probabilities that sum to 1, and sense on real text."""

import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

import zero3d.data.byte_models as module
from zero3d.data.byte_models import WittenBell, bits_per_byte
from zero3d.errors import DataError


def codes(text: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8)


@pytest.fixture(scope="module")
def of_aab() -> WittenBell:
    return WittenBell(codes(b"aab"))


def test_values_by_hand(of_aab: WittenBell) -> None:
    """Counts of "aab": a 2, b 1; after a: a 1, b 1; after aa: b 1; nothing after b."""
    p0_a, p0_b, p0_c = (2 + 2 / 256) / 5, (1 + 2 / 256) / 5, (2 / 256) / 5
    p1_a, p1_b = (1 + 2 * p0_a) / 4, (1 + 2 * p0_b) / 4
    p2_b = (1 + 1 * p1_b) / 2
    a, b, c = b"abc"
    assert of_aab.next_byte(b"")[[a, b, c]] == pytest.approx([p0_a, p0_b, p0_c], rel=1e-12)
    assert of_aab.next_byte(b"a")[[a, b]] == pytest.approx([p1_a, p1_b], rel=1e-12)
    assert of_aab.next_byte(b"aa")[b] == pytest.approx(p2_b, rel=1e-12)
    # A history never seen leaves what the shorter one says: after xa as after a, after b as after nothing.
    assert of_aab.next_byte(b"xa")[a] == pytest.approx(p1_a, rel=1e-12)
    assert of_aab.next_byte(b"b")[a] == pytest.approx(p0_a, rel=1e-12)
    assert of_aab.of_text(codes(b"aab"), 2) == pytest.approx([p0_a, p1_a, p2_b], rel=1e-12)

    bits = bits_per_byte(codes(b"aab"), codes(b"aab"))
    assert bits[0] == pytest.approx(-(2 * math.log2(p0_a) + math.log2(p0_b)) / 3, rel=1e-12)
    assert bits[2] == pytest.approx(-math.log2(p0_a * p1_a * p2_b) / 3, rel=1e-12)


@pytest.mark.parametrize("history", [b"", b"a", b"b", b"z", b"aa", b"ab", b"za", b"zz", b"\xff\xff"])
def test_probabilities_are_positive_and_sum_to_one(of_aab: WittenBell, history: bytes) -> None:
    distribution = of_aab.next_byte(history)
    assert distribution.min() > 0
    assert distribution.sum() == pytest.approx(1, rel=1e-12)


def test_against_plain_counting() -> None:
    """The same formula with dictionaries, a byte at a time; in several chunks, whose edges must not show."""
    rng = np.random.default_rng(0)
    train = bytes(rng.choice(np.frombuffer(b"abcd \n", np.uint8), 700, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]))
    heldout = bytes(rng.choice(np.frombuffer(b"abcde \n", np.uint8), 300))
    counts = [Counter(train[i : i + k + 1] for i in range(len(train) - k)) for k in range(3)]

    def probability(history: bytes, byte: int, order: int) -> float:
        if order < 0:
            return 1 / 256
        history = history[len(history) - order :]
        after = {gram: count for gram, count in counts[order].items() if gram[:-1] == history}
        lower = probability(history, byte, order - 1)
        if not after:
            return lower
        count = after.get(history + bytes([byte]), 0)
        return (count + len(after) * lower) / (sum(after.values()) + len(after))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", 256)
        found = bits_per_byte(codes(train), codes(heldout))
    for order in (0, 2):
        want = [-math.log2(probability(heldout[:place], byte, min(order, place))) for place, byte in enumerate(heldout)]
        assert found[order] == pytest.approx(sum(want) / len(want), rel=1e-12)


def test_more_context_helps_on_text_and_bounds_hold() -> None:
    text = ("".join(f"def f_{n}(x):\n    return x + {n}\n" for n in range(400))).encode()
    bits = bits_per_byte(codes(text[:-500]), codes(text[-500:]))
    assert bits[2] < 2 < bits[0] < 8


def test_bytes_never_seen_cost_much_but_not_everything() -> None:
    bits = bits_per_byte(codes(b"a" * 100), codes(b"zzz"))
    assert 8 < bits[0] < 16 and math.isfinite(bits[2])


def test_without_training_text_all_bytes_are_alike() -> None:
    assert bits_per_byte(codes(b""), codes(b"abc")) == {0: 8.0, 2: 8.0}


def test_no_heldout_text_is_refused() -> None:
    with pytest.raises(DataError, match="no held-out text"):
        bits_per_byte(codes(b"abc"), codes(b""))
