"""A set of positions of a flat vector."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gluefl.accel.masked import clear_bits


class Mask:
    """Booleans on a device that carry their count. The booleans are not to be written to.

    Counting synchronises with a GPU. So a mask whose count follows from its construction is given it, and one that
    was counted keeps it.

    >>> Mask(torch.tensor([True, False, True])).count
    2
    """

    __slots__ = ("_complement", "_count", "bits")

    def __init__(self, bits: Tensor, count: int | None = None) -> None:
        self.bits, self._count = bits, count
        self._complement: Mask | None = None

    @classmethod
    def uniform(cls, size: int, value: bool, device: torch.device) -> "Mask":
        """Every position, or none."""
        return cls(torch.full((size,), value, device=device), size if value else 0)

    @property
    def size(self) -> int:
        """d, how many positions there are."""
        return self.bits.numel()

    @property
    def known_count(self) -> int | None:
        """The count, if no counting is needed."""
        return self._count

    @property
    def count(self) -> int:
        """How many positions the mask covers."""
        if self._count is None:
            bits = self.bits
            self._count = int(torch.count_nonzero(bits)) if bits.is_cuda else int(np.count_nonzero(bits.numpy()))
        return self._count

    def remember(self, count: int) -> None:
        """Keep a count that was computed elsewhere."""
        self._count = count

    @property
    def density(self) -> float:
        """Share of the positions that are covered."""
        return self.count / self.size

    @property
    def complement(self) -> "Mask":
        """The other positions; made once, because every client of a round needs the same one."""
        if self._complement is None:
            self._complement = Mask(~self.bits, None if self._count is None else self.size - self._count)
        elif self._complement.known_count is None and self._count is not None:
            self._complement.remember(self.size - self._count)
        return self._complement

    @property
    def positions(self) -> Tensor:
        """The covered positions, increasing."""
        if self._count == self.size:
            return torch.arange(self.size, device=self.bits.device)
        if self.bits.is_cuda:
            return self.bits.nonzero().squeeze(1)
        return torch.from_numpy(np.flatnonzero(self.bits.numpy()))  # five times as fast as torch's nonzero on a CPU

    def joined(self, other: "Mask") -> "Mask":
        """The positions of two masks that share none."""
        counts = self.known_count, other.known_count
        count = counts[0] + counts[1] if counts[0] is not None and counts[1] is not None else None
        return Mask(self.bits | other.bits, count)

    def split(self, sizes: tuple[int, ...]) -> list["Mask"]:
        """The masks of consecutive segments; the mask itself if there is only one."""
        return [self] if len(sizes) == 1 else [Mask(bits) for bits in torch.split(self.bits, list(sizes))]


def where_clear(words: Tensor, places: Sequence[int]) -> list[Mask]:
    """For every place, the positions where that bit of a vector of 64-bit words is 0."""
    return [Mask(bits) for bits in clear_bits(words, places)]
