"""Samples that are kept because they will be asked for again, in memory or on a GPU."""

import threading
from collections import OrderedDict
from collections.abc import Callable

from gluefl.populations import Samples


class Shelf:
    """The clients asked for last, up to a number of bytes. Threads may share it; a pickled copy is empty."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: OrderedDict[int, Samples] = OrderedDict()
        self.bytes = 0
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Shelf"], tuple[int]]:
        return Shelf, (self.limit,)

    def __contains__(self, key: int) -> bool:
        return key in self.held

    def get(self, key: int, make: Callable[[], Samples]) -> Samples:
        """The samples kept under `key`, made if need be."""
        with self.lock:
            if key in self.held:
                self.held.move_to_end(key)
                return self.held[key]
        made = make()  # outside of the lock: two threads may both make it, and make the same
        with self.lock:
            if key not in self.held:
                self.held[key] = made
                self.bytes += weight(made)
            while self.bytes > self.limit and self.held:
                self.bytes -= weight(self.held.popitem(last=False)[1])
        return made


def weight(samples: Samples) -> int:
    """The bytes samples take."""
    return samples.inputs.nbytes + samples.labels.nbytes
