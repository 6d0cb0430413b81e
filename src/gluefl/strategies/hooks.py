"""What can be done to a client's update before it is compressed, and to the sum before it is selected from.

Clipping and noise are hooks: one object sees both sides, so that the noise on the sum follows from the clip on the
updates. Hooks run in the order in which they are given.
"""

from collections.abc import Sequence
from typing import Annotated, Protocol

from pydantic import Strict
from torch import Tensor

from gluefl.errors import UsageError
from gluefl.parameters import Has
from gluefl.strategies import Task, Upload


class Hook(Protocol):
    """Changes a client's update and the server's sum; either may be returned as it is."""

    def on_delta(self, delta: Tensor, task: Task) -> Tensor:
        """Client: the update to compress instead of `delta`."""
        ...

    def on_sum(self, total: Tensor, uploads: Sequence[Upload], round: int) -> Tensor:
        """Server: the sum to use instead of `total`."""
        ...


Hooks = Annotated[tuple[Annotated[Hook, Has(("on_delta", "on_sum"))], ...], Strict(False)]  # a list is one, too


def hooked_delta(hooks: Sequence[Hook], delta: Tensor, task: Task) -> Tensor:
    """A client's update after all hooks."""
    for hook in hooks:
        delta = _like(delta, hook.on_delta(delta, task), f"{type(hook).__name__}.on_delta")
    return delta


def hooked_sum(hooks: Sequence[Hook], total: Tensor, uploads: Sequence[Upload], round: int) -> Tensor:
    """The server's sum after all hooks."""
    for hook in hooks:
        total = _like(total, hook.on_sum(total, uploads, round), f"{type(hook).__name__}.on_sum")
    return total


def _like(given: Tensor, returned: object, name: str) -> Tensor:
    if isinstance(returned, Tensor) and _form(returned) == _form(given):
        return returned
    form = _form(returned) if isinstance(returned, Tensor) else type(returned).__name__
    raise UsageError(f"{name} returned {form}: it must return a tensor as the one it is given, {_form(given)}.")


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
