"""Work beside the round: compressing a message waits for nothing and nobody, so it runs on whatever core is free."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
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
    done.set_result(function(*arguments))
    return done


@cache
def _pool() -> ThreadPoolExecutor:
    # Whoever works here has one core: torch must not start threads of its own for it.
    return ThreadPoolExecutor(available(), "gluefl", initializer=torch.set_num_threads, initargs=(1,))
