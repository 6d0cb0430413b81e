"""STC: Sattler et al., Robust and Communication-Efficient Federated Learning, 2019.

By default Algorithm 1 of the GlueFL paper: top-q on the clients and top-q on the server, values as they are. The
original has ternary values, a sign times one magnitude, and feeds both compression errors back:
`STC(ternary=True, compensation="plain", server_feedback=True)`. Its clients download the sums of the updates that they
missed; here, as with every strategy, they download the weights that changed. Its positions are gaps in Golomb code;
here they have the codecs of all strategies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gluefl.parameters import Share, checked
from gluefl.strategies import Space, Task, Traits, Upload, plain_sum, weighted_sum
from gluefl.strategies.compensation import Compensation, compensate, remember
from gluefl.vectors.mask import Mask
from gluefl.vectors.selection import counts, top
from gluefl.vectors.sparse import Masked, Sparse, part_of
from gluefl.wire.ternary import Signs


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
    ternary: bool = False  # every value of an update becomes its sign times the mean magnitude of all of them

    def traits(self, space: Space) -> Traits:
        """Values travel as float32, ternary ones of uploads as signs and one magnitude."""
        return Traits(upload_codec=Signs()) if self.ternary else Traits()

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
        if self.ternary:
            sent = _ternary(sent)
        return sent, remember(delta, sent, task.weight, self.compensation)

    @plain_sum
    def combine(self, state: STCState, uploads: Sequence[Upload], round: int) -> Tensor:
        """Σ ν_i Δ_i."""
        return weighted_sum(uploads, state.space)

    def aggregate(self, state: STCState, total: Tensor, round: int) -> tuple[STCState, Sparse]:
        """Line 14: top_q of the weighted sum, with what was left out before if that is fed back."""
        if state.residual is not None:
            total = total + state.residual
        update = part_of(total, self._top(total, state.space, round))
        if self.ternary:
            update = _ternary(update)
        if state.residual is not None:
            rest = update.add_to(total.clone(), -1) if self.ternary else update.set_in(total.clone(), 0)
            state = replace(state, residual=rest)
        return state, update

    def _top(self, vector: Tensor, space: Space, round: int) -> Mask:
        segments = space.segments(self.scope)
        return top(vector, counts(self.q, segments, at_least=1), segments, round)


def _ternary(update: Sparse) -> Sparse:
    """The signs of values times their mean magnitude."""
    if isinstance(update, Masked):  # listing positions would synchronise with a GPU
        sizes = update.vector.abs().masked_fill(~update.mask.bits, 0)
        mean = (sizes.sum(dtype=torch.float64) / update.mask.bits.sum()).float()
        return Masked(update.mask, torch.where(update.vector < 0, -mean, mean), update.covers)
    mean = update.values.abs().mean(dtype=torch.float64).float()
    return update.with_values(torch.where(update.values < 0, -mean, mean))
