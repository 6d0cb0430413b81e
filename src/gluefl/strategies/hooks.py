"""What can be done to a client's update before it is compressed, and to the sum before it is selected from.

Clipping and noise are hooks: one object sees both sides, so that the noise on the sum follows from the clip on the
updates. Hooks run in the order in which they are given.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gluefl.strategies import Task, Upload


class Hook(Protocol):
    """Changes a client's update and the server's sum; either may be returned as it is."""

    def on_delta(self, delta: Tensor, task: Task) -> Tensor:
        """Client: the update to compress instead of `delta`."""
        ...

    def on_sum(self, total: Tensor, uploads: Sequence[Upload], round: int) -> Tensor:
        """Server: the sum to go on with instead of `total`."""
        ...
