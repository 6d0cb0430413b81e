"""Background work on CPU cores: a pool with a thread per core, and one thread that keeps the order of its tasks."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Barrier
from typing import Any, Generic, TypeVar

import torch

from gluefl.accel.resources import current

T = TypeVar("T")


class Pending(Generic[T]):
    """A result that may still be computed elsewhere; `result` waits for it, once."""

    def __init__(self, resolve: Callable[[], T]) -> None:
        self._resolve: Callable[[], T] | None = resolve
        self._result: T | None = None

    def result(self) -> T:
        """The result; an error of the computation is raised here."""
        if self._resolve is not None:
            self._result = self._resolve()
            self._resolve = None  # releases what it holds
        return self._result  # type: ignore[return-value]


def available() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def submit(function: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Call a function on the pool; at once with a single core or outside of a run."""
    held = current()
    return _called(function, *arguments) if held is None or available() == 1 else held.pool.submit(function, *arguments)


def submit_in_order(function: Callable[..., T], *arguments: Any) -> "Future[T]":
    """As `submit`, on one thread that keeps the order of its tasks.

    Tasks that launch many small kernels hold the interpreter lock most of the time: several of them at once would
    only contend for it.
    """
    held = current()
    if held is None or available() == 1:
        return _called(function, *arguments)
    return held.one_thread.submit(function, *arguments)


def on_all_cores(functions: Sequence[Callable[[], T]]) -> list[Pending[T]]:
    """Call functions on the pool, and return their results to come in the same order."""
    # One task for every core, not for every function: threads that switch every fifth of a millisecond lose half of it.
    tasks = min(available(), len(functions))
    pending: dict[int, Pending[T]] = {}
    for first in range(tasks):
        task = submit(lambda batch: [function() for function in batch], functions[first::tasks])
        for place in range(len(functions[first::tasks])):
            pending[first + place * tasks] = Pending(partial(_at, task, place))
    return [pending[i] for i in range(len(functions))]


def _at(task: "Future[list[T]]", place: int) -> T:
    return task.result()[place]


def _called(function: Callable[..., T], *arguments: Any) -> "Future[T]":
    done: Future[T] = Future()
    try:
        done.set_result(function(*arguments))
    except Exception as error:  # raised where the result is read, as with a pool
        done.set_exception(error)
    return done


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one core in this thread. Where the other cores are busy, an operation on several of them
    waits for the last one, often longer than it computes."""
    own = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(own)


def pool_of(count: int) -> ThreadPoolExecutor:
    """A pool whose threads use one core each.

    torch's thread count is a property of each thread, but a new thread inherits the count that was set last. So all
    threads start here, and then the caller's own count is set again.
    """
    own, ready = torch.get_num_threads(), Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # inherits now rather than at the first use
        torch.set_num_threads(1)
        ready.wait(timeout=60)

    pool = ThreadPoolExecutor(count, "gluefl", initializer=start)
    for _ in range(count):
        pool.submit(int)
    ready.wait(timeout=60)
    torch.set_num_threads(own)
    return pool
