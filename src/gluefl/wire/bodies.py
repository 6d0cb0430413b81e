"""What messages carry. A body is the same for all clients that hold one version; `messages` puts a header before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

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
    def positions(self) -> Tensor:
        """The positions that the mask covers."""
        return self.mask.positions

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
    codec: "ValueCodec | BodyCodec" = FLOAT32
    origin: Tensor | None = None  # version 0, where both sides know it


@runtime_checkable
class BodyCodec(Protocol):
    """Encodes an update with its positions, in messages with a compact header. Such a body has no statistics of its
    own and its shared mask is empty. `decode(encode(body)) == body` for the values that the codec can represent."""

    @property
    def code(self) -> int:
        """Its number on the wire, 0 to 255."""
        ...

    @property
    def fixed_bytes(self) -> int | None:
        """The length of every body, None if it depends on the body."""
        ...

    def measure(self, bodies: Sequence[Body]) -> list[int]:
        """The exact lengths in bytes, without encoding anything; synchronises with a device."""
        ...

    def estimate(self, update: Sparse) -> int:
        """About the length of a body, from the number of its values alone."""
        ...

    def longest(self, size: int) -> int:
        """No more bytes than this for a vector of `size` entries."""
        ...

    def encode(self, body: Body) -> bytes:
        """Positions and values."""
        ...

    def decode(self, data: memoryview, origin: Tensor | None) -> Sparse:
        """What `encode` wrote, or `WireError`; nothing is allocated beyond what the checked lengths allow."""
        ...
