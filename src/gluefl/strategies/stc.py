"""STC without its ternary values: Sattler et al., Robust and Communication-Efficient Federated Learning, 2019.

Algorithm 1 of the GlueFL paper: top-q on the clients and top-q on the server. The original's feedback of both
compression errors is there as options; Algorithm 1 has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gluefl.parameters import Share, checked
from gluefl.strategies import Space, Task, Traits, Upload, weighted_sum
from gluefl.strategies.compensation import Compensation, compensate, remember
from gluefl.vectors.mask import Mask
from gluefl.vectors.selection import counts, top
from gluefl.vectors.sparse import Sparse, part_of


@dataclass(frozen=True)
class STCState:
    """What the server's own top-q left out so far, if it is fed back."""

    space: Space
    residual: Tensor | None = None


@checked
@dataclass(frozen=True)
class STC:
    """Sparse updates whose positions neither side knows beforehand."""

    q: Share = 0.2
    compensation: Compensation = "none"
    server_feedback: bool = False
    scope: Literal["vector", "tensor"] = "vector"

    def traits(self, space: Space) -> Traits:
        """Values travel as float32."""
        return Traits()

    def init(self, space: Space, initial: Tensor) -> tuple[STCState, Tensor]:
        """Nothing left out yet."""
        return STCState(space, torch.zeros_like(initial) if self.server_feedback else None), initial

    def mask(self, state: STCState, round: int) -> Mask:
        """Nothing is known to both sides."""
        return state.space.mask(False)

    def frozen(self, mask: Mask) -> Mask | None:
        """Nothing."""
        return None

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """Line 10: top_q of the update."""
        delta = compensate(delta, residual, task.weight, self.compensation)
        sent = part_of(delta, self._top(delta, task.space, task.round))
        return sent, remember(delta, sent, task.weight, self.compensation)

    def combine(self, state: STCState, uploads: Sequence[Upload], round: int) -> Tensor:
        """Σ ν_i Δ_i."""
        return weighted_sum(uploads, state.space)

    def aggregate(self, state: STCState, total: Tensor, round: int) -> tuple[STCState, Sparse]:
        """Line 14: top_q of the weighted sum, with what was left out before if that is fed back."""
        if state.residual is not None:
            total = total + state.residual
        update = part_of(total, self._top(total, state.space, round))
        if state.residual is not None:
            state = replace(state, residual=update.set_in(total.clone(), 0))
        return state, update

    def _top(self, vector: Tensor, space: Space, round: int) -> Mask:
        segments = space.segments(self.scope)
        return top(vector, counts(self.q, segments, at_least=1), segments, round)
