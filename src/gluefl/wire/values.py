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

    def encode(self, values: Tensor) -> bytes:
        """The bytes of the values."""
        ...

    def decode(self, data: memoryview, count: int) -> Tensor:
        """`count` values as float32, or `WireError`; nothing is allocated beyond what `data` and `count` ask for."""
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

    def encode(self, values: Tensor) -> bytes:
        """The bytes of the values."""
        return values.detach().cpu().numpy().astype("<f4", copy=False).tobytes()

    def decode(self, data: memoryview, count: int) -> Tensor:
        """The values, exactly."""
        if len(data) != 4 * count:
            raise WireError(f"{count} values take {4 * count} bytes, {len(data)} were found")
        return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))


FLOAT32 = Float32()
