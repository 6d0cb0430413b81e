"""What a run changes in its process, for as long as it lasts: signals, the precision of products, the device."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gluefl.errors import UsageError


def device_of(name: str) -> torch.device:
    """A device that can be used here, by its name."""
    if name.partition(":")[0] in ("gpu", "nvidia"):
        raise UsageError(f"there is no device '{name}': a GPU is cuda, or cuda:1 for the second one.")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("its tensors have shapes and no values")
        torch.zeros(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # streams, graphs and kernels use the current device
    except Exception as error:  # every backend has errors of its own
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(f"device '{name}' cannot be used here: {reason}. Use cpu, or cuda with a GPU.") from error
    return device


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether products on a GPU may round their factors to ten bits."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def interruptible(second_ends: bool = True) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that the work in progress can be finished; a second one ends it at once."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if received and second_ends:
            raise KeyboardInterrupt
        received.append(number)

    try:
        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone may handle signals
        previous = {}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
