"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gluefl.parameters import checked
from gluefl.strategies import Space, Task, Upload, weighted_sum
from gluefl.vectors.selection import Sparse


@checked
@dataclass(frozen=True)
class FedAvg:
    """Everything travels, both ways."""

    def init(self, space: Space) -> Space:
        """FedAvg has no state of its own."""
        return space

    def mask(self, state: Space, round: int) -> Tensor:
        """Everything."""
        return state.mask(True)

    def frozen(self, mask: Tensor) -> Tensor | None:
        """Nothing."""
        return None

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """The whole update."""
        return Sparse.full(delta), None

    def aggregate(self, state: Space, uploads: Sequence[Upload], round: int) -> tuple[Space, Sparse]:
        """w + Σ ν_i Δ_i (equation 2)."""
        return state, Sparse.full(weighted_sum(uploads, state))
