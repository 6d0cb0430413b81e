"""Randomness is an argument. Every draw comes from (seed, purpose, round, client) and nothing else, so that
the order in which clients are trained, the engine and a resumed run change nothing. Drawn on the host by
numpy's Philox, because the generators of CPU and CUDA differ."""

import zlib

import numpy as np


def stream(seed: int, purpose: str, *path: int) -> np.random.Generator:
    """A generator of its own for one purpose: `stream(seed, "batches", round, client)`."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, zlib.crc32(purpose.encode()), *path))))
