"""A part of a flat vector: positions and their values.

One form per device. On a CPU positions are listed (`Listed`); on a GPU, where listing them would synchronise, the
part is a mask and the whole vector (`Masked`). Both give the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from gluefl.accel.masked import add_masked, add_weighted, scaled_outside
from gluefl.vectors.mask import Mask


class Support(Protocol):
    """How much of a vector is present, without the values."""

    @property
    def count(self) -> int:
        """How many positions are present."""
        ...

    @property
    def density(self) -> float:
        """Share of the positions that are present."""
        ...


class Sparse(Support, Protocol):
    """Increasing positions of a vector of `size` entries, and a value for each. `part_of` and `whole` make one."""

    @property
    def size(self) -> int:
        """d, the length of the vector."""
        ...

    @property
    def positions(self) -> Tensor:
        """The positions, increasing."""
        ...

    @property
    def values(self) -> Tensor:
        """A value for every position."""
        ...

    @property
    def mask(self) -> Mask:
        """The positions as a mask."""
        ...

    @property
    def support(self) -> Support:
        """The count alone, to be kept longer than the values."""
        ...

    @property
    def covers(self) -> Mask | None:
        """A mask all of whose positions are present by construction."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether every position is present, as far as is known without counting."""
        ...

    def dense(self) -> Tensor:
        """The vector, zero where nothing is present."""
        ...

    def add_to(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """Add `weight` times this to a vector, in place, and return it."""
        ...

    def set_in(self, vector: Tensor, value: float) -> Tensor:
        """Set the entries of a vector at these positions, in place, and return it."""
        ...

    def rest_of(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """`weight` times what a vector has beyond this: zero at positions where the values are those of the vector."""
        ...

    def finite(self) -> Tensor:
        """Whether all values are finite, as a boolean tensor that may still be computed."""
        ...

    def with_values(self, values: Tensor) -> "Sparse":
        """Other values at the same positions."""
        ...


@dataclass(frozen=True)
class Counted:
    """The support of a listed part."""

    size: int
    count: int

    @property
    def density(self) -> float:
        """Share of the positions that are present."""
        return self.count / self.size


@dataclass(frozen=True)
class Listed:
    """Positions and values, listed."""

    positions: Tensor
    values: Tensor
    size: int
    covers: Mask | None = None

    @property
    def count(self) -> int:
        """How many positions are present."""
        return self.positions.numel()

    @property
    def density(self) -> float:
        """Share of the positions that are present."""
        return self.count / self.size

    @property
    def support(self) -> Support:
        """The count alone."""
        return Counted(self.size, self.count)

    @property
    def is_whole(self) -> bool:
        """Whether every position is present."""
        return self.count == self.size

    @cached_property
    def mask(self) -> Mask:
        """The positions as a mask."""
        bits = torch.zeros(self.size, dtype=torch.bool, device=self.positions.device)
        bits[self.positions] = True
        return Mask(bits, self.count)

    def dense(self) -> Tensor:
        """The vector, zero where nothing is present."""
        return self.add_to(torch.zeros(self.size, dtype=self.values.dtype, device=self.values.device))

    def add_to(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """Add `weight` times this to a vector, in place, and return it."""
        return vector.index_add_(0, self.positions, self.values * weight)

    def set_in(self, vector: Tensor, value: float) -> Tensor:
        """Set the entries of a vector at these positions, in place, and return it."""
        return vector.index_fill_(0, self.positions, value)

    def rest_of(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """`weight` times what a vector has beyond this."""
        return self.add_to(vector * weight, -weight)

    def finite(self) -> Tensor:
        """Whether all values are finite."""
        return all_finite(self.values)

    def with_values(self, values: Tensor) -> "Listed":
        """Other values at the same positions."""
        return Listed(self.positions, values, self.size, self.covers)


@dataclass(frozen=True)
class Masked:
    """A mask and the vector it covers, which must not change as long as this is used."""

    mask: Mask
    vector: Tensor
    covers: Mask | None = None

    @property
    def size(self) -> int:
        """d, the length of the vector."""
        return self.mask.size

    @property
    def count(self) -> int:
        """How many positions are present."""
        return self.mask.count

    @property
    def density(self) -> float:
        """Share of the positions that are present."""
        return self.mask.density

    @property
    def support(self) -> Support:
        """The count alone."""
        return self.mask

    @property
    def is_whole(self) -> bool:
        """Whether every position is present, as far as is known without counting."""
        return self.mask.known_count == self.size

    @cached_property
    def positions(self) -> Tensor:
        """The positions, increasing."""
        return self.mask.positions

    @cached_property
    def values(self) -> Tensor:
        """A value for every position."""
        return self.vector if self.is_whole else self.vector.index_select(0, self.positions)

    def dense(self) -> Tensor:
        """The vector, zero where nothing is present."""
        return self.add_to(torch.zeros_like(self.vector))

    def add_to(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """Add `weight` times this to a vector, in place, and return it."""
        if self.is_whole:
            return add_weighted(vector, self.vector, weight)
        return add_masked(vector, [self.vector], [self.mask.bits], [weight])

    def set_in(self, vector: Tensor, value: float) -> Tensor:
        """Set the entries of a vector at these positions, in place, and return it."""
        return vector.fill_(value) if self.is_whole else vector.masked_fill_(self.mask.bits, value)

    def rest_of(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """`weight` times what a vector has beyond this."""
        if self.vector is not vector:  # the values were rounded
            return self.add_to(vector * weight, -weight)
        return torch.zeros_like(vector) if self.is_whole else scaled_outside(vector, self.mask.bits, weight)

    def finite(self) -> Tensor:
        """Whether all values are finite."""
        return all_finite(self.vector if self.is_whole else self.vector.masked_fill(~self.mask.bits, 0))

    def with_values(self, values: Tensor) -> Sparse:
        """Other values at the same positions."""
        return whole(values) if self.is_whole else Listed(self.positions, values, self.size, self.covers)


def all_finite(values: Tensor) -> Tensor:
    """Whether all values are finite. Only the extremes are tested, which takes a CPU a tenth of the time."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    smallest, largest = torch.aminmax(values)  # both are NaN if any value is
    return smallest.isfinite() & largest.isfinite()


def part_of(vector: Tensor, mask: Mask, covers: Mask | None = None) -> Sparse:
    """The entries of a vector that a mask covers; `covers` is a part of the mask by construction."""
    if vector.is_cuda:
        return Masked(mask, vector, covers)
    positions = mask.positions
    return Listed(positions, vector.index_select(0, positions), mask.size, covers)


def whole(vector: Tensor) -> Sparse:
    """All entries of a vector."""
    everything = torch.ones(1, dtype=torch.bool, device=vector.device).expand(vector.numel())  # takes no memory
    return Masked(Mask(everything, vector.numel()), vector)


def nothing(size: int, device: torch.device | str = "cpu") -> Sparse:
    """No entry at all."""
    return Listed(torch.zeros(0, dtype=torch.long, device=device), torch.zeros(0, device=device), size)


def add_all(vector: Tensor, parts: Sequence[Sparse], weights: Sequence[float]) -> Tensor:
    """Add weighted parts to a vector, in place and in their order, and return it; masked ones in common passes."""
    if all(isinstance(part, Masked) and not part.is_whole for part in parts):
        masked = [part for part in parts if isinstance(part, Masked)]
        return add_masked(vector, [part.vector for part in masked], [part.mask.bits for part in masked], weights)
    for part, weight in zip(parts, weights):
        part.add_to(vector, weight)
    return vector
