"""Memory that several processes share: the vectors of a round, written once and read by every worker."""

import mmap
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

MEMORY = "/dev/shm"  # noqa: S108 - a file in memory, without a name from the moment it is made
Places = dict[str, tuple[str, int, int]]  # by name: type, offset, length


class Block:
    """A file without a name, in memory where there is room: it ends with the last process that holds it."""

    def __init__(self, descriptor: int, size_bytes: int, writable: bool = False) -> None:
        self.descriptor, self.size_bytes = descriptor, size_bytes
        # Workers map it copy-on-write: what one of them writes by mistake is seen by nobody else.
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        self._memory = mmap.mmap(descriptor, size_bytes, access=access)

    @classmethod
    def of_size(cls, size_bytes: int) -> "Block":
        """A new one. Its memory is reserved now: later, a full disk would end the process."""
        for folder in (MEMORY, None):
            with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
                _reserve(file.fileno(), size_bytes)
                return cls(os.dup(file.fileno()), size_bytes, writable=True)
        raise OSError(f"no room for {size_bytes} bytes of shared memory in {MEMORY} or {tempfile.gettempdir()}")

    def write(self, arrays: Mapping[str, np.ndarray]) -> Places:
        """Write arrays one after the other; returns where they lie."""
        places: Places = {}
        at = 0
        for name, array in arrays.items():
            places[name] = (array.dtype.str, at, array.size)
            np.frombuffer(self._memory, array.dtype, array.size, at)[:] = array
            at += -(-array.nbytes // 64) * 64
        return places

    def read(self, places: Places) -> dict[str, np.ndarray]:
        """The arrays that were written, without a copy."""
        return {
            name: np.frombuffer(self._memory, np.dtype(kind), size, at) for name, (kind, at, size) in places.items()
        }

    def close(self) -> None:
        """Close the mapping and the descriptor. The memory itself is freed when no array refers to it."""
        with suppress(BufferError):
            self._memory.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def room_for(vectors: Mapping[str, np.ndarray]) -> int:
    """The bytes that `write` needs."""
    return sum(-(-array.nbytes // 64) * 64 for array in vectors.values()) + 64


def _reserve(descriptor: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
    else:
        os.ftruncate(descriptor, size_bytes)
