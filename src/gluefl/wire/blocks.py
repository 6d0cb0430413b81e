"""Values as small integers in blocks: every 256 consecutive values share a scale.

A scale is m · 2^u with m from 8 to 15, so that a value, an integer times its scale, is exact in float32, and so is the
difference of two values of one coordinate whose scales differ by no more than `MOST_CHANGE`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gluefl.errors import WireError
from gluefl.parameters import Count, checked
from gluefl.vectors.sparse import Masked, Sparse

BLOCK = 256
MANTISSAS = tuple(range(8, 16))  # m
SHIFT = 20  # the bits of a float32 that a scale leaves zero
LEAST_EXPONENT = -120  # u
LEAST_SCALE = 8 * 2.0**LEAST_EXPONENT
MOST_CHANGE = 2.0**12  # of a scale at once
CODES = {8: 2, 4: 3}  # numbers of the codecs on the wire, by bits


@checked
@dataclass(frozen=True)
class BlockIntegers:
    """The codec of values that `rounded` or `rounded_whole` returned.

    Layout, for n values: ⌈n/256⌉ scales, each the upper two bytes of a float32 (bfloat16), little-endian; then the
    integers in two's complement. Eight bits: one byte each, −127 to 127. Four bits: two a byte, −7 to 7, the earlier
    one in the lower half; an unused upper half is zero. A value is its integer times the scale of its block.
    """

    bits: Annotated[Count, Field(ge=4, le=8, multiple_of=4)]

    @property
    def code(self) -> int:
        """2 for eight bits, 3 for four."""
        return CODES[self.bits]

    @property
    def largest(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    def longest(self, size: int) -> int:
        """The length follows from the number of values."""
        return 2 * -(-size // BLOCK) + -(-size * self.bits // 8)

    def measure(self, update: Sparse) -> Callable[[], int]:
        """The length follows from the number of values."""
        support = update.support
        return lambda: self.longest(support.count)

    def encode(self, update: Sparse) -> bytes:
        """Scales and integers of values that lie on a grid in every block."""
        values = update.values.detach().cpu().numpy()
        rows = np.zeros((-(-values.size // BLOCK), BLOCK), np.float64)
        rows.reshape(-1)[: values.size] = values
        scales, integers = self._on_grid(rows)
        flat = integers.reshape(-1)[: values.size]
        if self.bits == 4:
            pairs = np.zeros(-(-flat.size // 2) * 2, np.int8)
            pairs[: flat.size] = flat
            halves = pairs.view(np.uint8) & 15
            flat = halves[::2] | halves[1::2] << 4
        upper = (scales.astype("<f4").view("<u4") >> 16).astype("<u2")
        return upper.tobytes() + flat.tobytes()

    def _on_grid(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A scale and integers for every row; the scale of a row that is not finite is NaN."""
        largest = np.abs(rows).max(1, initial=0)
        scales, integers = np.zeros(len(rows)), np.zeros(rows.shape, np.int8)
        finite = np.isfinite(largest)
        scales[~finite] = np.nan
        left = np.flatnonzero(finite & (largest > 0))
        for mantissa in MANTISSAS:
            fractions, exponents = np.frexp(largest[left] / (self.largest * mantissa))
            exponents = np.maximum(exponents - (fractions == 0.5), LEAST_EXPONENT)
            tried = np.ldexp(float(mantissa), exponents)
            quotients = rows[left] / tried[:, None]
            fits = (quotients == np.rint(quotients)).all(1)
            scales[left[fits]], integers[left[fits]] = tried[fits], quotients[fits]
            left = left[~fits]
        if left.size:
            raise ValueError(f"block {left[0]} holds values that are no multiples of one scale; round them first")
        return scales, integers

    def decode(self, data: memoryview, positions: Tensor) -> Tensor:
        """The values, exactly, or `WireError`."""
        count = positions.numel()
        if len(data) != self.longest(count):
            raise WireError(f"{count} values take {self.longest(count)} bytes, {len(data)} were found")
        blocks = -(-count // BLOCK)
        scales = (np.frombuffer(data, "<u2", blocks).astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):
            values_are_finite = np.isfinite(scales * np.float32(self.largest)).all()
        if not values_are_finite or np.signbit(scales).any():
            raise WireError("the scale of a block is negative, too large or not a number")
        integers = np.frombuffer(data, np.int8, offset=2 * blocks)
        if self.bits == 4:
            halves = integers
            integers = np.empty(2 * halves.size, np.int8)
            integers[::2], integers[1::2] = halves << 4 >> 4, halves >> 4
            if integers[count:].any():
                raise WireError("the padding of the integers is not zero")
            integers = integers[:count]
        if (integers < -self.largest).any():
            raise WireError(f"an integer lies outside -{self.largest} to {self.largest}")
        return torch.from_numpy(integers * np.repeat(scales, BLOCK)[:count])


def rounded(update: Sparse, bits: int, draws: np.random.Generator) -> Sparse:
    """Values on the grids of blocks of consecutive values, rounded up or down at random: the mean is the value."""
    if isinstance(update, Masked) and not update.is_whole:
        return _rounded_masked(update, bits, draws)
    values = update.values
    rows = _rows(values)
    scales = _scales(rows.abs().amax(1), bits).unsqueeze(1)
    uniform = _rows(_uniform(draws, values.numel(), values.device))
    return update.with_values(_at_random(rows, scales, uniform, bits).flatten()[: values.numel()])


def _rounded_masked(update: Masked, bits: int, draws: np.random.Generator) -> Sparse:
    """The same bits without listing the positions."""
    present, vector = update.mask.bits, update.vector
    numbers = (torch.cumsum(present, 0) - 1).clamp_(min=0)  # of the values, in their order
    blocks = numbers // BLOCK
    largest = torch.zeros(-(-update.size // BLOCK), device=vector.device)
    largest.scatter_reduce_(0, blocks, vector.abs().masked_fill(~present, 0), "amax")
    count = update.mask.known_count
    uniform = _uniform(draws, update.size if count is None else max(count, 1), vector.device).index_select(0, numbers)
    scales = _scales(largest, bits).index_select(0, blocks)
    return Masked(update.mask, _at_random(vector, scales, uniform, bits), update.covers)


def rounded_whole(vector: Tensor, bits: int, before: Tensor | None = None) -> Tensor:
    """The nearest values on the grids of the blocks of a vector. With what it was before, the grids change so little
    that before + (after − before) is after, exactly: a block that grows faster saturates."""
    rows = _rows(vector)
    scales = _scales(rows.abs().amax(1), bits)
    if before is not None:
        last = _scales(_rows(before).abs().amax(1), bits)
        limited = scales.clamp(last / MOST_CHANGE, last * MOST_CHANGE).clamp(min=LEAST_SCALE)
        scales = torch.where((last > 0) & (scales > 0), limited, scales)
    units = torch.round(rows / _divisors(scales.unsqueeze(1)))
    return (_within(units, bits) * scales.unsqueeze(1) + 0.0).flatten()[: vector.numel()]


def _rows(values: Tensor) -> Tensor:
    padding = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, padding)).view(-1, BLOCK)


def _scales(largest: Tensor, bits: int) -> Tensor:
    """The smallest scales with which these magnitudes can be written; 0 for 0, NaN for what is not finite."""
    # By a tensor: on a GPU, dividing by a number is multiplying by its reciprocal, which rounds differently.
    quotients = (largest / torch.full_like(largest, (1 << (bits - 1)) - 1)).clamp(min=LEAST_SCALE)
    up = ((quotients.view(torch.int32) + ((1 << SHIFT) - 1)) >> SHIFT << SHIFT).view(torch.float32)
    up = torch.where(torch.isfinite(largest), up, torch.nan)
    return torch.where(largest == 0, 0.0, up)


def _divisors(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _within(units: Tensor, bits: int) -> Tensor:
    largest = (1 << (bits - 1)) - 1
    return units.clamp_(-largest, largest)


def _at_random(values: Tensor, scales: Tensor, uniform: Tensor, bits: int) -> Tensor:
    units = values / _divisors(scales)
    floors = units.floor()
    return _within(floors + (uniform < units - floors), bits) * scales + 0.0


def _uniform(draws: np.random.Generator, count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(draws.random(count, dtype=np.float32)).to(device)
