"""The server's own step: learning rate and momentum on the published update.

Momentum lives on the coordinates of the update alone. A velocity that moved every coordinate in every round would
make every update dense, and undo what masking saves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gluefl.parameters import Decay, Positive, checked
from gluefl.strategies import Space
from gluefl.vectors.selection import Sparse


@checked
@dataclass(frozen=True)
class Server:
    """w ← w + lr · v, v ← momentum · v + Δ, on the positions of Δ."""

    lr: Positive = 1.0
    momentum: Decay = 0.0

    def init(self, space: Space) -> Tensor | None:
        """The velocity before round 1."""
        return torch.zeros(space.size, device=space.device) if self.momentum else None

    def step(self, velocity: Tensor | None, update: Sparse) -> tuple[Tensor | None, Sparse]:
        """The next velocity and the update to publish."""
        if velocity is None and self.lr == 1:
            return velocity, update
        values = update.values
        if velocity is not None:
            velocity = velocity.clone()
            values = self.momentum * velocity[update.positions] + values
            velocity[update.positions] = values
        if self.lr != 1:
            values = self.lr * values
        return velocity, Sparse(update.positions, values, update.size)
