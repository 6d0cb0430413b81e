"""Noise by address: a number for (seed, purpose, keys), the same whenever and in whatever order it is asked.

A hash and not `randomness.stream`, because a fleet is asked for single numbers of single clients, millions of
them when a whole population is ranked: building a generator for each would take twenty times as long, and a
hash of an array of clients is one call. Only 64-bit integer arithmetic, so the same on every machine."""

import functools
import zlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.lru_cache(maxsize=256)
def _root(seed: int, purpose: str) -> int:
    root = _mix(np.array([(seed * _GOLDEN + zlib.crc32(purpose.encode())) & _WORD], np.uint64))
    return int(root[0])


def _word(seed: int, purpose: str, keys: tuple[ArrayLike, ...]) -> NDArray[np.uint64]:
    word: NDArray[np.uint64] = np.array([_root(seed, purpose)], np.uint64)
    for key in keys:
        part = np.atleast_1d(np.asarray(key, np.int64)).view(np.uint64)
        word = _mix((word ^ part) * np.uint64(_GOLDEN) + np.uint64(1))
    return word


def uniform(seed: int, purpose: str, *keys: ArrayLike) -> Floats:
    """Numbers strictly between 0 and 1, one per combination of the broadcast integer keys (at least 1-d)."""
    return ((_word(seed, purpose, keys) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(seed: int, purpose: str, *keys: ArrayLike) -> Floats:
    """Standard normal numbers by Box and Muller from the two halves of a word, addressed like `uniform`."""
    word = _word(seed, purpose, keys)
    first = ((word >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    second = (word & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    result: Floats = np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)
    return result
