"""Rotated vectors as bytes: scales as float32, then codes of a few bits. The length is a constant of the codec."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gluefl.errors import WireError
from gluefl.parameters import Count, NonNegativeCount, checked
from gluefl.vectors.rotation import Rotated
from gluefl.wire.values import float_bytes

TOGETHER = 8  # codes that fill whole bytes


@checked
@dataclass(frozen=True)
class RotatedCodec:
    """Encodes what `Rotated.compress` returns: `sent` codes for every block, then a scale for every block."""

    blocks: NonNegativeCount
    sent: Count  # codes per block
    bits: Annotated[Count, Field(le=4)]
    code: ClassVar[int] = 7

    @property
    def codes(self) -> int:
        """How many codes there are."""
        return self.blocks * self.sent

    def measure(self) -> int:
        """The length in bytes."""
        return 4 * self.blocks + -(-self.codes * self.bits // 8)

    def encode(self, vector: Tensor) -> bytes:
        """Scales, little-endian; then the codes, the least significant bit first, padded with zeros to a whole byte."""
        if vector.shape != (self.codes + self.blocks,):
            raise ValueError(f"{tuple(vector.shape)} numbers were given, {self.codes + self.blocks} were expected")
        host = vector.detach().cpu()
        rows = np.zeros((-(-self.codes // TOGETHER), TOGETHER), np.uint8)
        rows.reshape(-1)[: self.codes] = host[: self.codes].numpy()
        words = np.zeros(len(rows), "<u4")
        for place in range(TOGETHER):
            words |= rows[:, place].astype("<u4") << np.uint32(place * self.bits)
        packed = words.view(np.uint8).reshape(-1, 4)[:, : self.bits].tobytes()
        return float_bytes(host[self.codes :]) + packed[: self.measure() - 4 * self.blocks]

    def decode(self, data: bytes | memoryview) -> Tensor:
        """The vector, exactly, or `WireError`; allocates no more than a vector of the expected length needs."""
        if len(data) != self.measure():
            raise WireError(f"{self.measure()} bytes of scales and codes were expected, {len(data)} were found")
        scales = np.frombuffer(data, "<f4", self.blocks)
        if not np.isfinite(scales).all() or np.signbit(scales).any():
            raise WireError("the scale of a block is negative or not finite")
        raw = np.frombuffer(data, np.uint8, offset=4 * self.blocks)
        groups = -(-self.codes // TOGETHER)
        padded = np.zeros(groups * self.bits, np.uint8)
        padded[: raw.size] = raw
        quads = np.zeros((groups, 4), np.uint8)
        quads[:, : self.bits] = padded.reshape(groups, self.bits)
        words = quads.view("<u4")[:, 0]
        vector = np.empty(self.codes + self.blocks, np.float32)
        rows = np.empty((groups, TOGETHER), np.uint8)
        for place in range(TOGETHER):
            rows[:, place] = (words >> np.uint32(place * self.bits)) & np.uint32(2**self.bits - 1)
        if rows.reshape(-1)[self.codes :].any():
            raise WireError("the padding of the codes is not zero")
        vector[: self.codes], vector[self.codes :] = rows.reshape(-1)[: self.codes], scales
        return torch.from_numpy(vector)


def rotated_codec(rotated: Rotated, d: int) -> RotatedCodec:
    """The codec for vectors of d entries that a compressor was given."""
    blocks = rotated.blocks(d)
    return RotatedCodec(blocks.count, blocks.sent, rotated.bits)
