"""Work beside the round: compressing a message, say, waits for nobody, so it runs on whatever core is free, and what
it needs of a GPU goes past what that is busy with."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def available() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def beside(function: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Call a function on another core; at once where there is only one."""
    return _done(function, *arguments) if available() == 1 else _pool().submit(function, *arguments)


def in_turn(function: Callable[..., T], *arguments: Any) -> "Future[T]":
    """As `beside`, but one after the other, in a thread of its own: work that gives a GPU many small things to do holds
    the interpreter most of the time, and several such threads only stand in each other's way."""
    return _done(function, *arguments) if available() == 1 else _turns().submit(function, *arguments)


def works_by_itself(device: torch.device) -> bool:
    """Whether the cores are free while a device computes."""
    return device.type != "cpu"


def stream_beside(device: torch.device, purpose: str) -> "torch.cuda.Stream":
    """A stream of a GPU for what is done beside a round. It goes first: the cores wait for it."""
    return _stream(torch.cuda.current_device() if device.index is None else device.index, purpose)


@cache
def _stream(index: int, purpose: str) -> "torch.cuda.Stream":
    return torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]


def started(device: torch.device) -> "torch.cuda.Event":
    """All that a GPU was given to do so far; who waits for it does not spin."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given. To just copy the result would wait, too, but in the middle of the
    copy, and then the driver keeps all other threads from starting anything."""
    if device.type == "cuda":
        started(device).synchronize()


def to_host(tensor: Tensor) -> Tensor:
    """A copy that will be there when a GPU has done what it was given."""
    if not tensor.is_cuda:
        return tensor
    # Pinned memory is copied to at four times the speed; PyTorch keeps it for the next time.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def fetched(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy from a GPU. To be called for the copy: waits for it, and for nothing that was started since."""
    copy = to_host(tensor)
    if not tensor.is_cuda:
        return lambda: copy
    there = started(tensor.device)

    def wait() -> Tensor:
        there.synchronize()
        return copy

    return wait


@contextmanager
def overtaking(device: torch.device, purpose: str) -> Iterator[None]:
    """What is started here goes past what a GPU is busy with: all that it needs must be there already."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(stream_beside(device, purpose)):
        yield


def moved_beside(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, past what a GPU is busy with: a copy in its turn would wait for all of that."""
    if device.type != "cuda":
        return tensor.to(device)
    with overtaking(device, "copies"):
        moved = tensor.to(device)
        wait_for(device)
    moved.record_stream(torch.cuda.current_stream(device))  # so that nobody gets its memory while it is read there
    return moved


def _done(function: Callable[..., T], *arguments: Any) -> "Future[T]":
    done: Future[T] = Future()
    try:
        done.set_result(function(*arguments))
    except Exception as error:  # raised where the result is asked for, as on many cores
        done.set_exception(error)
    return done


@cache
def _pool() -> ThreadPoolExecutor:
    return quiet_pool(available())


@cache
def _turns() -> ThreadPoolExecutor:
    return quiet_pool(1)


def quiet_pool(count: int) -> ThreadPoolExecutor:
    """Threads with a core each, in which torch starts none of its own. Its number of threads is one of a thread's own,
    but a thread that is new takes the last one anybody set: so all start here, and then the caller's is set again."""
    own, ready = torch.get_num_threads(), Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # takes the last number, so that it is not taken at the first use
        torch.set_num_threads(1)
        ready.wait(timeout=60)

    pool = ThreadPoolExecutor(count, "gluefl", initializer=start)
    for _ in range(count):
        pool.submit(int)
    ready.wait(timeout=60)
    torch.set_num_threads(own)
    return pool
