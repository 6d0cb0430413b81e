"""What travels and what becomes of it: one paper, one file, the client's half and the server's half together.

`docs/your-own-strategy.md` shows how to write another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gluefl.vectors.selection import Sparse, add_all, uniform_mask

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Space:
    """The vector space of a model: the sizes of its tensors, in order, and where its vectors lie."""

    tensors: tuple[int, ...]
    device: torch.device = CPU

    @property
    def size(self) -> int:
        """d."""
        return sum(self.tensors)

    def segments(self, scope: str) -> tuple[int, ...]:
        """Over which parts top-k is taken: the whole vector (the paper) or every tensor by itself."""
        return self.tensors if scope == "tensor" else (self.size,)

    def mask(self, value: bool) -> Tensor:
        """A mask that is the same everywhere."""
        return uniform_mask(self.size, value, self.device)


@dataclass(frozen=True)
class Task:
    """What a client is told: the round, the mask both sides know (M^t), its nominal weight (ν_i)."""

    round: int
    mask: Tensor
    weight: float
    space: Space


@dataclass(frozen=True)
class Upload:
    """What a client sent and was used: `weight` is the weight it enters the sum with."""

    client: int
    weight: float
    update: Sparse
    statistics: Tensor
    loss: float | Tensor  # a tensor is one number: to make it a float is to wait for a GPU


class Strategy(Protocol):
    """Both halves of an algorithm. The state is a frozen dataclass of tensors, numbers and None."""

    def init(self, space: Space) -> Any:
        """The server's state before round 1."""
        ...

    def mask(self, state: Any, round: int) -> Tensor:
        """What both sides know in this round: values at these positions travel without positions."""
        ...

    def frozen(self, mask: Tensor) -> Tensor | None:
        """Client: the coordinates that local training must not move, None for none."""
        ...

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """Client: what to upload of an update, and what to remember for the next time."""
        ...

    def aggregate(self, state: Any, uploads: Sequence[Upload], round: int) -> tuple[Any, Sparse]:
        """Server: the next state and the update of the model; its positions count as changed."""
        ...


def weighted_sum(uploads: Sequence[Upload], space: Space) -> Tensor:
    """Σ ν_i Δ_i, always in the order of the uploads: the same bits whoever was trained first."""
    total = torch.zeros(space.size, device=space.device)
    return add_all(total, [upload.update for upload in uploads], [upload.weight for upload in uploads])
