"""Work beside the round: compressing a message waits for nothing and nobody, so it runs on whatever core is free."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def available() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def beside(function: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Call a function on another core; at once where there is only one."""
    if available() > 1:
        return _pool().submit(function, *arguments)
    done: Future[T] = Future()
    try:
        done.set_result(function(*arguments))
    except Exception as error:  # raised where the result is asked for, as on many cores
        done.set_exception(error)
    return done


@cache
def _pool() -> ThreadPoolExecutor:
    return quiet_pool(available())


def quiet_pool(count: int) -> ThreadPoolExecutor:
    """Threads with a core each, in which torch starts none of its own. Its number of threads is one of a thread's own,
    but a thread that is new takes the last one anybody set: so all start here, and then the caller's is set again."""
    own, started = torch.get_num_threads(), Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # takes the last number, so that it is not taken at the first use
        torch.set_num_threads(1)
        started.wait(timeout=60)

    pool = ThreadPoolExecutor(count, "gluefl", initializer=start)
    for _ in range(count):
        pool.submit(int)
    started.wait(timeout=60)
    torch.set_num_threads(own)
    return pool
