"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gluefl.parameters import checked
from gluefl.strategies import Space, Task, Traits, Upload, plain_sum, weighted_sum
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse, whole


@checked
@dataclass(frozen=True)
class FedAvg:
    """Clients download the whole model and upload their whole update."""

    def traits(self, space: Space) -> Traits:
        """Values travel as float32."""
        return Traits(dense=True)

    def init(self, space: Space, initial: Tensor) -> tuple[Space, Tensor]:
        """FedAvg has no state of its own."""
        return space, initial

    def mask(self, state: Space, round: int) -> Mask:
        """Everything."""
        return state.mask(True)

    def frozen(self, mask: Mask) -> Mask | None:
        """Nothing."""
        return None

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """The whole update."""
        return whole(delta), None

    @plain_sum
    def combine(self, state: Space, uploads: Sequence[Upload], round: int) -> Tensor:
        """Σ ν_i Δ_i (equation 2)."""
        return weighted_sum(uploads, state)

    def aggregate(self, state: Space, total: Tensor, round: int) -> tuple[Space, Sparse]:
        """w + Σ ν_i Δ_i."""
        return state, whole(total)
