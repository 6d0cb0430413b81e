"""Threads, streams and captured graphs of a run. They are made when first used and released when the run ends.

>>> with resources():
...     train()

Outside of a run the functions of this package work without them: background work is done at once.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
        self._pool: ThreadPoolExecutor | None = None
        self._one_thread: ThreadPoolExecutor | None = None

    @property
    def pool(self) -> ThreadPoolExecutor:
        """A thread per core."""
        from gluefl.accel.threads import available, pool_of

        with self.lock:  # runs in two threads must not make two pools
            self._pool = self._pool or pool_of(available())
            return self._pool

    @property
    def one_thread(self) -> ThreadPoolExecutor:
        """One thread that does its tasks in order."""
        from gluefl.accel.threads import pool_of

        with self.lock:
            self._one_thread = self._one_thread or pool_of(1)
            return self._one_thread

    def close(self) -> None:
        """Finish the tasks under way and release everything."""
        for executor in (self._one_thread, self._pool):  # the first hands tasks to the second
            if executor is not None:
                executor.shutdown(wait=True)
        self.streams.clear()
        self.graphs.clear()


_open: list[Resources] = []  # at most one; empty when no run is in progress
_OPENING = threading.Lock()  # guards `_open` and `users`


def current() -> Resources | None:
    """The resources of the run in progress, None outside of one."""
    return next(iter(_open), None)  # one operation: another thread may empty the list meanwhile


@contextmanager
def resources() -> Iterator[Resources]:
    """Open the resources of a run, or share those of a run in progress."""
    with _OPENING:
        held = current() or Resources()
        if not held.users:
            _open.append(held)
        held.users += 1
    try:
        yield held
    finally:
        with _OPENING:
            held.users -= 1
            is_last = not held.users
            if is_last:
                _open.remove(held)
        if is_last:
            held.close()
