"""Grids on which published values lie: a power-of-two step per tensor, or floats of a few mantissa bits.

Values on a grid are exact in float32, so that a replica is equal bit for bit wherever it is computed. Every operation
here is exact or rounds once, and gives the same bits on every device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from gluefl.accel.streams import numbers_on

MANTISSA_BITS = 3  # of the logarithmic grid
SHIFT = 23 - MANTISSA_BITS  # the bits of a float32 that the logarithmic grid leaves out
LEAST = 2.0**-126  # of the positive values on the logarithmic grid
FACTOR = 2.0**16  # by which a value on the logarithmic grid may change at once: the difference stays exact


@dataclass(frozen=True)
class Segments:
    """The tensors of a flat vector, one after the other."""

    sizes: tuple[int, ...]
    device: torch.device

    @cached_property
    def lengths(self) -> Tensor:
        """The sizes, on the device."""
        return self.numbers(self.sizes, torch.int64)

    @cached_property
    def _index(self) -> Tensor:
        """The number of its tensor for every entry."""
        return self._repeated(torch.arange(len(self.sizes), dtype=torch.int32, device=self.device))

    @cached_property
    def bounds(self) -> Tensor:
        """Where the tensors begin, and where the last one ends."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.sizes))

    def numbers(self, of_tensors: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """One number per tensor, on the device."""
        return numbers_on(self.device, of_tensors, dtype)

    def spread(self, numbers: Tensor) -> Tensor:
        """One number per tensor as one number per entry."""
        if self.device.type == "cuda":  # repeating takes long there: a few threads write a whole tensor
            return numbers.index_select(0, self._index)
        return self._repeated(numbers)

    def means(self, values: Tensor) -> Tensor:
        """The mean of every tensor of a vector; 0 of an empty one."""
        sums = torch.zeros(len(self.sizes), dtype=torch.float64, device=values.device)
        if values.is_cuda:
            totals = torch.nn.functional.pad(torch.cumsum(values, 0, dtype=torch.float64), (1, 0))
            sums = totals[self.bounds].diff()
        elif values.numel():
            filled = np.flatnonzero(self.sizes)  # `reduceat` has no sum of nothing
            starts = np.cumsum([0, *self.sizes])[filled]
            sums[filled] = torch.from_numpy(np.add.reduceat(values.numpy(), starts, dtype=np.float64))
        return (sums / self.lengths.clamp(min=1)).float()

    def largest(self, values: Tensor) -> Tensor:
        """The largest magnitude of every tensor of a vector."""
        tensors = torch.zeros(len(self.sizes), device=values.device)
        return tensors.scatter_reduce_(0, self._index.long(), values.abs(), "amax")

    def _repeated(self, numbers: Tensor) -> Tensor:
        return torch.repeat_interleave(numbers, self.lengths, output_size=self._ends[-1] if self.sizes else 0)


def power_of_two(numbers: Tensor) -> Tensor:
    """The nearest power of two of positive numbers, on a logarithmic scale; 0 for 0."""
    mantissas, exponents = torch.frexp(numbers)
    return torch.where(numbers > 0, two_to(exponents - (mantissas < 0.5**0.5).int()), 0.0)


def two_to(exponents: Tensor) -> Tensor:
    """Powers of two, limited to the normal numbers of float32; `torch.ldexp` calls `pow`, which may round on a GPU."""
    return (exponents.clamp(-126, 127) + 127 << 23).int().view(torch.float32)


def nearest(values: Tensor, origin: Tensor, steps: Tensor) -> Tensor:
    """The nearest value that is a whole number of steps from the origin; NaN where the step is infinite."""
    return origin + torch.round((values - origin) / steps) * steps


def on_grid(values: Tensor, steps: Tensor) -> Tensor:
    """The nearest multiples of steps; zero is +0."""
    return torch.round(values / steps) * steps + 0.0


def logarithmic(values: Tensor) -> Tensor:
    """The nearest floats of `MANTISSA_BITS` bits; what is positive stays positive, what is negative becomes +0."""
    bits = values.contiguous().view(torch.int32)
    near = ((bits + (1 << (SHIFT - 1))) >> SHIFT << SHIFT).view(torch.float32)
    return torch.where(values > 0, near.clamp(min=LEAST), torch.where(values <= 0, 0.0, near))


def logarithmic_distance(values: Tensor, others: Tensor) -> Tensor:
    """How many values of the logarithmic grid lie between positive numbers, with fractions."""
    bits = values.contiguous().view(torch.int32) - others.contiguous().view(torch.int32)
    return bits / float(1 << SHIFT)


def spreads(vector: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The standard deviation and the largest magnitude of every tensor, the same on every device."""
    parts = [part.numpy() for part in torch.split(vector.detach().cpu().double(), list(sizes))]
    deviations = [float(np.std(part)) if part.size else 0.0 for part in parts]
    return torch.tensor(deviations), torch.tensor([float(np.abs(part).max(initial=0.0)) for part in parts])
