"""What messages carry. A body is the same for all clients that hold one version; `messages` puts a header before it.

The positions of a body and the mask it shares are encoded when they are asked for, unless that was started before
(`encoding`): then what was started is waited for.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from gluefl.vectors.selection import Sparse, count_true, positions_of
from gluefl.wire.positions import LaidOut, Packed, lay_out, lay_out_list, pack, squeeze

ABSOLUTE, BESIDE_MASK, KNOWN = range(3)  # relation of a set of positions to the shared mask
Encoded = tuple[int, Packed]  # a set of positions and its relation to the shared mask
Handed = dict[int, tuple["Future[list[Encoded]]", int]]  # id of what has positions → a task and its place in it


class HasPositions(Protocol):
    """What has positions to encode."""

    @property
    def present(self) -> Tensor:
        """The positions, as a mask."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether these are known to be all there are: then `present` is not needed."""
        ...

    @property
    def shared_mask(self) -> Tensor:
        """The mask both sides know."""
        ...

    @property
    def covered(self) -> Tensor | None:
        """A mask that is known to be part of it."""
        ...

    @property
    def relative(self) -> bool:
        """Whether positions may be given in relation to the shared mask."""
        ...

    def encoded_here(self) -> Encoded:
        """The positions, encoded by whoever asks."""
        ...


@dataclass(frozen=True)
class Shared:
    """The mask both sides know, with what encoding needs of it, computed once."""

    mask: Tensor

    @cached_property
    def packed(self) -> Packed:
        """The mask, encoded."""
        return (_handed(self) or self.encoded_here())[1]

    @cached_property
    def outside(self) -> Tensor:
        """The positions that the mask does not cover."""
        return positions_of(~self.mask)

    @cached_property
    def numbers(self) -> np.ndarray:
        """Of every position that the mask does not cover: how many of those come before."""
        numbers = np.empty(self.mask.numel(), np.int32)
        numbers[self.outside.numpy()] = np.arange(self.outside.numel(), dtype=np.int32)
        return numbers

    def encoded_here(self) -> Encoded:
        """The mask, in relation to nothing."""
        return ABSOLUTE, pack(self.mask)

    present = shared_mask = covered = property(lambda self: self.mask)
    is_whole = relative = False


@dataclass(frozen=True)
class Body:
    """Values at some positions, the statistics, and the shared mask: sent in a package, known in an upload."""

    update: Sparse
    statistics: Tensor
    shared: Shared
    sends_mask: bool

    @cached_property
    def positions(self) -> Encoded:
        """The positions, encoded."""
        return _handed(self) or self.encoded_here()

    def encoded_here(self) -> Encoded:
        """The positions, beside the shared mask where that covers part of them, else on their own."""
        update, shared, known = self.update, self.shared, count_true(self.shared.mask)
        if update.count == update.size:
            return ABSOLUTE, squeeze(LaidOut(update.size, update.size))
        if update.listed and not shared.mask.is_cuda:  # to go over the list is faster than over a mask, and needs none
            positions = update.positions.numpy()
            unique = positions[np.flatnonzero(~shared.mask.numpy()[positions])] if known else positions
            if known and positions.size - unique.size == known:
                return BESIDE_MASK, squeeze(lay_out_list(shared.numbers[unique], update.size - known))
            return ABSOLUTE, squeeze(lay_out_list(positions, update.size))
        mask = update.mask()
        inside = count_true(mask & shared.mask) if known else 0
        if known and inside == known:
            return BESIDE_MASK, squeeze(lay_out(mask.index_select(0, shared.outside), update.count - inside))
        return ABSOLUTE, squeeze(lay_out(mask, update.count))

    present = property(lambda self: self.update.mask())
    is_whole = property(lambda self: self.update.is_whole)
    shared_mask = property(lambda self: self.shared.mask)
    covered = property(lambda self: self.update.covered)
    relative = True


def _handed(owner: HasPositions) -> Encoded | None:
    """What was started elsewhere, if it was."""
    handed: Future[Handed] | None = vars(owner).get("handed")
    task, place = (None, 0) if handed is None else handed.result().get(id(owner), (None, 0))
    return None if task is None else task.result()[place]
