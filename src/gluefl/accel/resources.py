"""Threads, streams and captured graphs of a run. They are made when first used and released when the run ends.

>>> with resources():
...     train()

Outside of a run the functions of this package work without them: background work is done at once.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch


class Resources:
    """What one run holds. Runs that overlap in one process share them."""

    def __init__(self) -> None:
        self.users = 0
        self.lock = threading.RLock()
        self.streams: dict[tuple[int, str], torch.cuda.Stream] = {}  # by device and purpose
        self.graphs: dict[tuple[object, ...], Any] = {}  # captured passes of top-k, by device, stream and length
        self.of_thread = threading.local()

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """A thread per core."""
        from gluefl.accel.threads import available, pool_of

        return pool_of(available())

    @cached_property
    def one_thread(self) -> ThreadPoolExecutor:
        """One thread that does its tasks in order."""
        from gluefl.accel.threads import pool_of

        return pool_of(1)

    def close(self) -> None:
        """Finish the tasks under way and release everything."""
        for name in ("one_thread", "pool"):  # the first hands tasks to the second
            if name in vars(self):
                getattr(self, name).shutdown(wait=True)
        self.streams.clear()
        self.graphs.clear()


_open: list[Resources] = []  # at most one; empty when no run is in progress


def current() -> Resources | None:
    """The resources of the run in progress, None outside of one."""
    return _open[-1] if _open else None


@contextmanager
def resources() -> Iterator[Resources]:
    """Open the resources of a run, or share those of a run in progress."""
    held = current() or Resources()
    if not held.users:
        _open.append(held)
    held.users += 1
    try:
        yield held
    finally:
        held.users -= 1
        if not held.users:
            _open.remove(held)
            held.close()
