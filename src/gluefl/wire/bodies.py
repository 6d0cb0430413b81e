"""What messages carry. A body is the same for all clients that hold one version; `messages` puts a header before it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse
from gluefl.wire.values import FLOAT32, ValueCodec


@dataclass(frozen=True)
class Shared:
    """The mask both sides know, with what encoding and decoding need of it, computed once."""

    mask: Mask

    @cached_property
    def outside(self) -> Tensor:
        """The positions that the mask does not cover."""
        return self.mask.complement.positions

    @cached_property
    def numbers(self) -> np.ndarray:
        """For every position outside the mask, how many positions outside come before it."""
        numbers = np.empty(self.mask.size, np.int32)
        numbers[self.outside.numpy()] = np.arange(self.outside.numel(), dtype=np.int32)
        return numbers


@dataclass(frozen=True)
class Body:
    """Values at positions, the statistics, and the shared mask: sent in a package, known in an upload."""

    update: Sparse
    statistics: Tensor
    shared: Shared
    sends_mask: bool
    codec: ValueCodec = FLOAT32
