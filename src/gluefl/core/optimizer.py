"""The server's own step on what the clients' updates add up to."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gluefl.parameters import Decay, Positive, checked
from gluefl.strategies import Space
from gluefl.vectors.sparse import Sparse


class Optimizer(Protocol):
    """A step of the server. `Traits.optimizer_acts_on` of the strategy says whether it is given the sum of all
    updates, as a whole vector, or the update that is published. The state is a tree, as that of a strategy."""

    def init(self, space: Space) -> Any:
        """The state before round 1."""
        ...

    def step(self, state: Any, update: Sparse) -> tuple[Any, Sparse]:
        """The next state, and the update to use instead, on the same positions."""
        ...


@checked
@dataclass(frozen=True)
class Server:
    """SGD: w ← w + lr · v, v ← momentum · v + Δ, on the positions of Δ.

    A velocity that moved every coordinate in every round would make every update dense and undo what masking saves.
    """

    lr: Positive = 1.0
    momentum: Decay = 0.0

    def init(self, space: Space) -> Tensor | None:
        """The velocity before round 1."""
        return torch.zeros(space.size, device=space.device) if self.momentum else None

    def step(self, state: Tensor | None, update: Sparse) -> tuple[Tensor | None, Sparse]:
        """The next velocity and the update to publish."""
        velocity, values = state, update.values if state is not None or self.lr != 1 else None
        if values is None:
            return velocity, update
        if velocity is not None:
            velocity = velocity.clone()
            values = self.momentum * velocity[update.positions] + values
            velocity[update.positions] = values
        return velocity, update.with_values(values if self.lr == 1 else self.lr * values)
