"""What counting alone achieves: byte models of order 0 and 2, as a yardstick for a trained model.

    P_k(c | h) = (count(h c) + kinds(h) P_{k-1}(c | h')) / (count(h) + kinds(h)),    P_{-1} = 1/256

with count(h c) how often byte c followed the k bytes h, count(h) its sum over c, kinds(h) how many different
bytes followed h, and h' the last k - 1 bytes of h; where h was never seen, P_{k-1} stands. This is
interpolated Witten-Bell smoothing (Witten and Bell 1991, method C; Chen and Goodman 1998).
"""

import numpy as np
import numpy.typing as npt

from zero3d.errors import DataError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

_CHUNK = 1 << 22


def bits_per_byte(train: Bytes, heldout: Bytes) -> dict[int, float]:
    """{0: bits, 2: bits} that models of order 0 and 2, fitted on `train` [n], spend per byte of `heldout`.

    The first two bytes of `heldout` have a shorter history and are given by orders 0 and 1. Takes a table of
    64 MB, and up to 300 MB more while it is filled. DataError: `heldout` is empty.
    """
    if not len(heldout):
        raise DataError("no held-out text to evaluate on", where="byte models", hint="Give more text.")
    model = WittenBell(train)
    bits = {0: 0.0, 2: 0.0}
    for start in range(0, len(heldout), _CHUNK):
        before = min(start, 2)
        part = heldout[start - before : start + _CHUNK]
        for order in bits:
            bits[order] -= float(np.log2(model.of_text(part, order)[before:]).sum())
    return {order: total / len(heldout) for order, total in bits.items()}


class WittenBell:
    """Probabilities of orders 0, 1 and 2 from counts of the bytes in `train` [n]."""

    def __init__(self, train: Bytes) -> None:
        self._counts = [_count(train, order) for order in range(3)]
        self._totals = [counts.sum(axis=1, dtype=np.int64) for counts in self._counts]
        self._kinds = [np.count_nonzero(counts, axis=1) for counts in self._counts]

    def of_text(self, text: Bytes, order: int) -> Floats:
        """The probability [n] of each byte of `text` [n] after those before it, by the model of `order`."""
        codes = text.astype(np.int64)
        result = np.full(len(codes), 1 / 256)
        for lower in range(order + 1):
            # Bytes with fewer than `lower` before them keep what the orders below say.
            history = _histories(codes, lower)
            result[lower:] = self._raise_order(lower, history, codes[lower:], result[lower:])
        return result

    def next_byte(self, history: bytes) -> Floats:
        """The distribution [256] of the byte after `history` of 0 to 2 bytes, by the model of that order."""
        result = np.full(256, 1 / 256)
        for order in range(len(history) + 1):
            index = int.from_bytes(history[len(history) - order :], "big")
            result = self._raise_order(order, np.full(256, index), np.arange(256), result)
        return result

    def _raise_order(
        self, order: int, history: npt.NDArray[np.int64], code: npt.NDArray[np.int64], lower: Floats
    ) -> Floats:
        count = self._counts[order][history, code]
        total, kinds = self._totals[order][history], self._kinds[order][history]
        seen = total > 0
        return np.where(seen, (count + kinds * lower) / np.where(seen, total + kinds, 1), lower)


def _histories(codes: npt.NDArray[np.int64], order: int) -> npt.NDArray[np.int64]:
    """For each byte from number `order` on, the `order` bytes before it read as one number."""
    size = max(len(codes) - order, 0)
    number = np.zeros(size, dtype=np.int64)
    for place in range(order):
        number = number * 256 + codes[place : place + size]
    return number


def _count(text: Bytes, order: int) -> npt.NDArray[np.unsignedinteger[npt.NBitBase]]:
    """How often each byte followed each history: [256 ** order, 256]."""
    cells = 256 ** (order + 1)
    counts = np.zeros(cells, dtype=np.uint32 if len(text) < 1 << 32 else np.uint64)
    for start in range(0, len(text), _CHUNK):
        codes = text[start : start + _CHUNK + order].astype(np.int64)
        index = _histories(codes, order) * 256 + codes[order:]
        np.add(counts, np.bincount(index, minlength=cells), out=counts, casting="unsafe")
    return counts.reshape(-1, 256)
