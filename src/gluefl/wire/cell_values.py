"""Positions and values of decoded cells, few at once: as whole numbers and doubles, all take many times the model."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gluefl.errors import WireError
from gluefl.wire import rice

SHIFT = 20  # bits below a logarithmic cell: sign, exponent and 3 bits of the mantissa are left
INFINITE = 0x7F8  # the logarithmic cell of infinity


class Fields(Protocol):
    """What a message says of every tensor."""

    counts: np.ndarray
    exponents: np.ndarray
    reordered: np.ndarray
    partial: np.ndarray


def fill(
    fields: Fields,
    tensors: Sequence[int],
    logarithmic: Sequence[bool],
    gaps: np.ndarray,
    codes: np.ndarray,
    origin: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of the cells of all tensors, or `WireError`."""
    positions, values = np.empty(codes.size, np.int64), np.empty(codes.size, np.float32)
    entry = gap = start = 0
    for tensor, size in enumerate(tensors):
        stop, last = entry + int(fields.counts[tensor]), start - 1
        exponent = None if logarithmic[tensor] else int(fields.exponents[tensor])
        while entry < stop:
            piece = slice(entry, min(entry + rice.PIECE, stop))
            count = piece.stop - entry
            steps = np.ones(count, np.int64)
            if fields.partial[tensor]:
                steps += gaps[gap : gap + count]
                gap += count
            positions[piece] = np.cumsum(steps) + last
            entry, last = piece.stop, int(positions[piece.stop - 1])
            if last >= start + size:
                raise WireError("a position lies outside its tensor")
            cells = rice.signed_numbers(codes[piece], fields.reordered[tensor])
            base = np.zeros(1, np.float32) if origin is None else origin[positions[piece]]
            values[piece], valid = _logarithmic(cells, base) if exponent is None else _linear(cells, exponent, base)
            if not valid.all():
                wrong = int(positions[piece][valid.argmin()])
                raise WireError(f"the value at position {wrong} is no finite float32 on its grid")
        start += size
    return positions, values


def _linear(cells: np.ndarray, exponent: int, base: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """base + cell * 2^exponent, and whether that is exact."""
    moved, wide = cells * np.ldexp(1.0, exponent), base.astype(np.float64)
    sums = wide + moved
    with np.errstate(over="ignore"):
        values = sums.astype(np.float32)
    return values, (sums - wide == moved) & (sums - moved == wide) & (values == sums)


def _logarithmic(cells: np.ndarray, base: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The float32 of every cell, and whether it is one that is finite and not negative."""
    patterns = cells + ((base + np.float32(0)).view(np.int32) >> SHIFT)
    valid = (patterns >= 0) & (patterns < INFINITE)
    return (np.where(valid, patterns, 0).astype(np.int32) << SHIFT).view(np.float32), valid
