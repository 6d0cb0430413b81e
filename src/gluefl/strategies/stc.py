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
from gluefl.strategies import Space, Task, Upload, weighted_sum
from gluefl.strategies.compensation import Compensation, compensate, remember
from gluefl.vectors.selection import Sparse, counts, top


@dataclass(frozen=True)
class STCState:
    """What the server's own top-q left out so far, if it is fed back."""

    space: Space
    residual: Tensor | None = None


@checked
@dataclass(frozen=True)
class STC:
    """Sparse updates whose positions nobody knows beforehand."""

    q: Share = 0.2
    compensation: Compensation = "none"
    server_feedback: bool = False
    scope: Literal["vector", "tensor"] = "vector"

    def init(self, space: Space) -> STCState:
        """Nothing left out yet."""
        return STCState(space, torch.zeros(space.size, device=space.device) if self.server_feedback else None)

    def mask(self, state: STCState, round: int) -> Tensor:
        """Nothing is known to both sides."""
        return state.space.mask(False)

    def frozen(self, mask: Tensor) -> Tensor | None:
        """Nothing."""
        return None

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """Line 10: top_q of the update."""
        delta = compensate(delta, residual, task.weight, self.compensation)
        sent = Sparse.where(self._top(delta, task.space, task.round), delta)
        return sent, remember(delta, sent, task.weight, self.compensation)

    def aggregate(self, state: STCState, uploads: Sequence[Upload], round: int) -> tuple[STCState, Sparse]:
        """Line 14: top_q of the weighted sum."""
        total = weighted_sum(uploads, state.space)
        if state.residual is not None:
            total += state.residual
        update = Sparse.where(self._top(total, state.space, round), total)
        if state.residual is not None:
            state = replace(state, residual=update.set_in(total.clone(), 0))
        return state, update

    def _top(self, vector: Tensor, space: Space, round: int) -> Tensor:
        segments = space.segments(self.scope)
        return top(vector, counts(self.q, segments, at_least=1), segments, round)
