"""Values that differ only by their sign: one bit each, and one magnitude for all or for every block.

With positions encoded elsewhere these are the ternary updates of STC (Sattler et al., 2019); a rotated update of one
bit per coordinate has a magnitude for every block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gluefl.errors import WireError
from gluefl.parameters import Count, checked
from gluefl.vectors.sparse import Sparse
from gluefl.wire.values import float_bytes

MAGNITUDE = np.uint32(0x7FFFFFFF)  # the bits of a float32 but its sign


@checked
@dataclass(frozen=True)
class Signs:
    """The codec of such values.

    Layout, for n values in blocks of B: ⌈n/B⌉ magnitudes, float32, little-endian; then ⌈n/8⌉ bytes with a bit for
    every value, the least significant first, 1 for plus; unused bits are zero. Without a block length all values share
    one magnitude.
    """

    block: Count | None = None  # B

    @property
    def code(self) -> int:
        """4 for one magnitude, 5 for one per block."""
        return 4 if self.block is None else 5

    def longest(self, size: int) -> int:
        """The length follows from the number of values."""
        return 4 * self._blocks(size) + -(-size // 8)

    def _blocks(self, count: int) -> int:
        return min(count, 1) if self.block is None else -(-count // self.block)

    def measure(self, update: Sparse) -> Callable[[], int]:
        """The length follows from the number of values."""
        support = update.support
        return lambda: self.longest(support.count)

    def encode(self, update: Sparse) -> bytes:
        """Magnitudes and signs of values of one magnitude in every block."""
        values = update.values.detach().cpu()
        magnitudes = values[:: self.block or max(values.numel(), 1)].abs()
        bits = values.numpy().view(np.uint32) & MAGNITUDE
        if (bits != self._spread(magnitudes.numpy(), bits.size).view(np.uint32)).any():
            raise ValueError("the values of a block differ by more than their sign")
        plus = np.packbits(~np.signbit(values.numpy()), bitorder="little")
        return float_bytes(magnitudes) + plus.tobytes()

    def decode(self, data: memoryview, positions: Tensor) -> Tensor:
        """The values, exactly, or `WireError`."""
        count = positions.numel()
        if len(data) != self.longest(count):
            raise WireError(f"{count} signs and magnitudes take {self.longest(count)} bytes, {len(data)} were found")
        blocks = self._blocks(count)
        magnitudes = np.frombuffer(data, "<f4", blocks).astype(np.float32)
        if not np.isfinite(magnitudes).all() or np.signbit(magnitudes).any():
            raise WireError("a magnitude is negative or not finite")
        plus = np.unpackbits(np.frombuffer(data, np.uint8, offset=4 * blocks), bitorder="little")
        if plus[count:].any():
            raise WireError("the padding of the signs is not zero")
        values = self._spread(magnitudes, count)
        return torch.from_numpy(np.where(plus[:count], values, -values))

    def _spread(self, magnitudes: np.ndarray, count: int) -> np.ndarray:
        return np.repeat(magnitudes, self.block or max(count, 1))[:count]
