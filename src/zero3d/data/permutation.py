"""A random order of n things that is computed, not stored: where does position i go?

A Feistel network with keyed rounds is a bijection of the numbers of b bits, whatever its rounds compute. With
b the bits of n - 1 there are fewer than 2n such numbers; a result outside 0 to n - 1 is sent through again
until it is inside, which keeps it a bijection ("cycle-walking": Black and Rogaway 2002, "Ciphers with
Arbitrary Finite Domains").
"""

import hashlib

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def shuffled(positions: npt.ArrayLike, n: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Positions [k] in 0 to n - 1 -> their places [k] in an order of n things that (seed, epoch) chooses.

    The same on every machine; takes time and memory in proportion to k, not n.
    """
    values = np.atleast_1d(np.asarray(positions, dtype=np.uint64))
    assert 0 < n <= 1 << 62 and (not len(values) or int(values.max()) < n)
    keys = _round_keys(seed, epoch)
    bits = (n - 1).bit_length()
    values = _feistel(values, bits, keys)
    while len(outside := np.flatnonzero(values >= np.uint64(n))):
        values[outside] = _feistel(values[outside], bits, keys)
    return values.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode("ascii"), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(values: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of the numbers of `bits` bits, whose two halves scramble each other in turn."""
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << (bits + 1) // 2) - 1)
    high_mask = np.uint64((1 << bits // 2) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(keys):
        if number % 2:
            high = high ^ (_mix(low ^ key) & high_mask)
        else:
            low = low ^ (_mix(high ^ key) & low_mask)
    return (high << low_bits) | low


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spreads every bit over all 64 (the finalizer of splitmix64, Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))
