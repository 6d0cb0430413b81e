"""CUDA streams, events and copies. On a CPU every function here works synchronously."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gluefl.accel.resources import current


def is_asynchronous(device: torch.device) -> bool:
    """Whether a device computes while the host continues."""
    return device.type != "cpu"


def side_stream(device: torch.device, purpose: str) -> "torch.cuda.Stream":
    """A high-priority stream of a GPU, one for each purpose of a run."""
    index = torch.cuda.current_device() if device.index is None else device.index
    held = current()
    if held is None:
        return torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]
    with held.lock:
        if (index, purpose) not in held.streams:
            held.streams[index, purpose] = torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]
        return held.streams[index, purpose]


@contextmanager
def on_side_stream(device: torch.device, purpose: str) -> Iterator[None]:
    """Launch on a side stream. It is not ordered with the main stream: its inputs must be complete already."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(side_stream(device, purpose)):
        yield


def recorded(device: torch.device) -> "torch.cuda.Event":
    """An event after everything launched so far on the current stream; waiting for it blocks without spinning."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def synchronise(device: torch.device) -> None:
    """Wait for the current stream of a GPU.

    A synchronous copy would wait too, but inside the driver's copy call, which blocks launches of all other threads.
    """
    if device.type == "cuda":
        recorded(device).synchronize()


def to_host(tensor: Tensor) -> Tensor:
    """An asynchronous copy in host memory, complete when the current stream is."""
    if not tensor.is_cuda:
        return tensor
    # Copies to pinned memory are four times as fast; PyTorch's allocator reuses it.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def numbers_on(device: torch.device, numbers: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """A list of numbers as a tensor on a device. From memory that is not pinned the copy would synchronise."""
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def fetched(tensor: Tensor) -> Callable[[], Tensor]:
    """Start an asynchronous copy; the returned function waits for the copy and for nothing launched since."""
    copy = to_host(tensor)
    if not tensor.is_cuda:
        return lambda: copy
    complete = recorded(tensor.device)

    def wait() -> Tensor:
        complete.synchronize()
        return copy

    return wait


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device; on a GPU by a side stream, so that it does not queue behind the training."""
    if device.type != "cuda":
        return tensor.to(device)
    with on_side_stream(device, "copies"):
        copy = tensor.to(device)
        synchronise(device)
    copy.record_stream(torch.cuda.current_stream(device))  # its memory is not reused while the main stream reads it
    return copy
