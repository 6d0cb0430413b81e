"""Vectors in memory: on a GPU, and in RAM in memory of their own. Least recently used first."""

import mmap
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

SLAB_BYTES = 1 << 26  # taken from the system at a time


@dataclass(frozen=True)
class Scaled:
    """A vector as it is stored: `scale * values`."""

    scale: float
    values: Tensor


class DeviceTier:
    """Vectors on the GPU where they were made."""

    def __init__(self) -> None:
        self.held: OrderedDict[int, Scaled] = OrderedDict()

    def put(self, client: int, vector: Scaled) -> None:
        """Keep a vector; the tier does not copy it, unless it is a part of a larger tensor."""
        if vector.values.untyped_storage().nbytes() > vector.values.nbytes:
            vector = Scaled(vector.scale, vector.values.clone())  # a row of a matrix would keep the whole matrix
        self.held[client] = vector
        self.held.move_to_end(client)

    def read(self, client: int, device: torch.device | str) -> Tensor:
        """The values, in float32."""
        self.held.move_to_end(client)
        return self.held[client].values.to(device, torch.float32)


class HostTier:
    """Vectors in RAM, in slots that are used again.

    Vectors that lie among what training allocates and frees would fragment the heap: three times the memory. Copies
    between a GPU and RAM are asynchronous; `last_copy` is an event after the last of them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: OrderedDict[int, Scaled] = OrderedDict()
        self.last_copy: torch.cuda.Event | None = None
        self._free: list[Tensor] = []

    def put(self, client: int, vector: Scaled) -> None:
        """Copy a vector into a slot."""
        if client in self.held:
            slot = self.held[client].values
        else:
            if not self._free:
                self._free += _slots(self.size, vector.values)
            slot = self._free.pop()
        if vector.values.is_cuda:
            slot.copy_(vector.values, non_blocking=True)
            self.last_copy = _event()
        else:
            self._synchronise()  # an asynchronous copy may still read the slot
            slot.copy_(vector.values)
        self.held[client] = Scaled(vector.scale, slot)
        self.held.move_to_end(client)

    def read(self, client: int, device: torch.device | str) -> Tensor:
        """A copy of the values, in float32."""
        self.held.move_to_end(client)
        values = self.held[client].values
        if torch.device(device).type != "cuda":
            self._synchronise()
            return values.to(device, torch.float32, copy=True)
        copy = values.to(device, non_blocking=True).float()
        self.last_copy = _event()
        return copy

    def pop(self, client: int) -> Tensor:
        """Forget a vector and return its slot, to be given to `release` when nothing reads it any more."""
        return self.held.pop(client).values

    def release(self, slot: Tensor) -> None:
        """Use a slot again."""
        self._free.append(slot)

    def clear(self) -> None:
        """Forget everything."""
        self._free += [vector.values for vector in self.held.values()]
        self.held.clear()

    def _synchronise(self) -> None:
        if self.last_copy is not None:
            self.last_copy.synchronize()
            self.last_copy = None


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _slots(size: int, like: Tensor) -> list[Tensor]:
    """Memory for several vectors, in pages of their own; pinned for those that come from a GPU."""
    count = min(256, max(1, SLAB_BYTES // max(1, size * like.element_size())))
    if like.is_cuda:
        slab = torch.empty(count * size, dtype=like.dtype, pin_memory=True)
    else:
        pages = mmap.mmap(-1, max(1, count * size * like.element_size()))
        slab = torch.frombuffer(pages, dtype=like.dtype, count=count * size)
    return list(slab.view(count, size))
