"""Noise by address: a number for (seed, purpose, keys), independent of when and in which order it is requested.

A hash and not `randomness.stream`: a fleet needs single numbers of single clients, and millions of them to rank a
whole population. Constructing a generator per client takes twenty times as long; the hash of an array of clients is
one call. Only 64-bit integer arithmetic is used, so results are the same on every machine."""

import zlib
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True)
class Noise:
    """Random numbers of one purpose: `Noise(seed=1, purpose="download").uniform(clients)`."""

    seed: int
    purpose: str

    @cached_property
    def _root(self) -> NDArray[np.uint64]:
        return _mix(np.array([(self.seed * _GOLDEN + zlib.crc32(self.purpose.encode())) & _WORD], np.uint64))

    def _word(self, keys: tuple[ArrayLike, ...]) -> NDArray[np.uint64]:
        word = self._root
        for key in keys:
            part = np.atleast_1d(np.asarray(key, np.int64)).view(np.uint64)
            word = _mix((word ^ part) * np.uint64(_GOLDEN) + np.uint64(1))
        return word

    def uniform(self, *keys: ArrayLike) -> Floats:
        """Numbers strictly between 0 and 1, one per combination of the broadcast integer keys (at least 1-d)."""
        numbers = ((self._word(keys) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return np.minimum(numbers, 1 - 2.0**-53)  # the largest word would be rounded to 1

    def normal(self, *keys: ArrayLike) -> Floats:
        """Standard normal numbers (Box–Muller, from the two halves of a word), addressed like `uniform`."""
        word = self._word(keys)
        first = ((word >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
        second = (word & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
        result: Floats = np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)
        return result
