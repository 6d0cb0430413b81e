"""How values become bytes. A codec is named by a number in its section; a receiver accepts the one it expects."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gluefl.errors import WireError
from gluefl.vectors.sparse import Sparse


class ValueCodec(Protocol):
    """Encodes the values of a body. `decode(encode(values)) == values` for the values it can represent."""

    @property
    def code(self) -> int:
        """Its number on the wire, 0 to 255."""
        ...

    def measure(self, update: Sparse) -> Callable[[], int]:
        """The length in bytes, to be called when it is needed: counting positions may synchronise with a device."""
        ...

    def longest(self, size: int) -> int:
        """No more bytes than this for at most `size` values."""
        ...

    def encode(self, update: Sparse) -> bytes:
        """The bytes of the values of a part of a vector; the positions are encoded elsewhere."""
        ...

    def decode(self, data: memoryview, positions: Tensor) -> Tensor:
        """A float32 value for every position, or `WireError`; nothing is allocated beyond what these ask for."""
        ...


class Float32:
    """The values as they are, little-endian."""

    code = 0

    def measure(self, update: Sparse) -> Callable[[], int]:
        """Four bytes a value."""
        support = update.support  # not the update: a measurement must not keep its values in memory
        return lambda: 4 * support.count

    def longest(self, size: int) -> int:
        """Four bytes a value."""
        return 4 * size

    def encode(self, update: Sparse) -> bytes:
        """The values."""
        return float_bytes(update.values)

    def decode(self, data: memoryview, positions: Tensor) -> Tensor:
        """The values, exactly."""
        return floats(data, positions.numel())


FLOAT32 = Float32()
LARGEST_HALF = 65504.0


class Float16:
    """Two bytes a value: IEEE 754 half precision, little-endian. `halved` rounds values to those that it represents."""

    code = 1

    def measure(self, update: Sparse) -> Callable[[], int]:
        """Two bytes a value."""
        support = update.support
        return lambda: 2 * support.count

    def longest(self, size: int) -> int:
        """Two bytes a value."""
        return 2 * size

    def encode(self, update: Sparse) -> bytes:
        """The values, which must be representable."""
        values = update.values.detach().cpu()
        halves = values.half()
        if not torch.equal(halves.float().nan_to_num(), values.nan_to_num()):
            raise ValueError("values that are not representable as float16 were given; round them with halved")
        return halves.numpy().astype("<f2", copy=False).tobytes()

    def decode(self, data: memoryview, positions: Tensor) -> Tensor:
        """The values, exactly."""
        count = positions.numel()
        if len(data) != 2 * count:
            raise WireError(f"{count} values take {2 * count} bytes, {len(data)} were found")
        return torch.from_numpy(np.frombuffer(data, "<f2").astype(np.float32))


FLOAT16 = Float16()


def halved(values: Tensor) -> Tensor:
    """The nearest values that float16 represents; what is too large becomes its largest, what is not finite stays."""
    near = values.clamp(-LARGEST_HALF, LARGEST_HALF).half().float()
    return torch.where(torch.isfinite(values), near, values)


def float_bytes(values: Tensor) -> bytes:
    """Floats as they are, little-endian."""
    return values.detach().cpu().numpy().astype("<f4", copy=False).tobytes()


def floats(data: memoryview, count: int) -> Tensor:
    """What `float_bytes` wrote."""
    if len(data) != 4 * count:
        raise WireError(f"{count} values take {4 * count} bytes, {len(data)} were found")
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))
