"""Which recent versions had the present value of a coordinate.

A value on a grid often crosses a boundary and comes back. A client that holds a version from before that misses
nothing there, although the coordinate changed since.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gluefl.vectors.mask import Mask, where_clear

VERSIONS = 63  # how many versions are remembered, the present one among them
ALL = 2**VERSIONS - 1
PIECE = 1 << 24  # coordinates


@dataclass(frozen=True)
class Recurrence:
    """Bits by coordinate: bit k says that the value k versions ago was the present one.

    The value before the present one has such bits, too, for a coordinate that comes back to it. A third value is
    forgotten, so that a bit may be 0 where the values were equal, and is never 1 where they differed.
    """

    same: Tensor  # int64
    previous: Tensor  # the value before the present one
    previous_same: Tensor  # int64

    @classmethod
    def init(cls, vector: Tensor) -> "Recurrence":
        """Version 0."""
        ones = torch.ones_like(vector, dtype=torch.int64)
        return cls(ones, vector, torch.zeros_like(ones))

    def step(self, old: Tensor, new: Tensor) -> "Recurrence":
        """The next version. A large vector is done in pieces: the intermediate results take more than the result."""
        if new.numel() <= PIECE:
            return self._stepped(old, new)
        whole = [torch.empty_like(bits) for bits in (self.same, self.previous, self.previous_same)]
        for start in range(0, new.numel(), PIECE):
            at = slice(start, start + PIECE)
            piece = Recurrence(self.same[at], self.previous[at], self.previous_same[at])._stepped(old[at], new[at])
            for target, part in zip(whole, (piece.same, piece.previous, piece.previous_same)):
                target[at] = part
        return Recurrence(*whole)

    def _stepped(self, old: Tensor, new: Tensor) -> "Recurrence":
        changed, back = new != old, new == self.previous
        same, previous_same = (bits << 1 & ALL for bits in (self.same, self.previous_same))
        returned = torch.where(back, previous_same, torch.zeros_like(same))
        return Recurrence(
            same=torch.where(changed, returned, same) | 1,
            previous=torch.where(changed, old, self.previous),
            previous_same=torch.where(changed, same, previous_same),
        )

    def missing(self, ages: Iterable[int]) -> dict[int, Mask]:
        """The coordinates whose value differs from that of so many versions ago, by age, as far as is remembered."""
        remembered = [age for age in ages if age < VERSIONS]
        return dict(zip(remembered, where_clear(self.same, remembered)))
